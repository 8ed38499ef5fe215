"""The checkers, one module a notebook: nbNN holds those of notebook NN, loaded when first asked."""
