"""Guess several tokens cheaply, verify them in one forward: exact, and faster.

draft         what a guess is: a chain or a tree of tokens, with what they were drawn from
verify        acceptance, residual, bonus: the target's distribution comes out unchanged
block         verify a chain as one block: exact, and no fewer guesses accepted
target        the model as a function from tokens to logits, its cache rolled back or caught up
speculate     the loop: rounds, budgets, end tokens, stops, and what a run came to
expected      tokens a round, speed-up and best gamma predicted; the proof for two symbols
ngram         draft by looking the last words up in the prompt
draft_model   draft with a smaller model, or with fewer layers of the same one
vocabulary    an output head for the frequent tokens only
medusa        heads that guess several tokens at once, verified as a tree
eagle         one layer that continues the target's features, and a tree by confidence
typical       Medusa's lossy acceptance, for comparison
trained       the heads that come with the course
prompts       what they were trained on, and what drafts are measured on
"""
