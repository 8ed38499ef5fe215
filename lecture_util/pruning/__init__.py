"""Cut parts out of a model, and repair what is left.

importance  what a calibration set says each layer, head, neuron and channel is worth
prune       smaller, ordinary checkpoints: fewer layers, heads, neurons, channels
distill     the original teaches what was cut: logits, temperature, hidden states
"""
