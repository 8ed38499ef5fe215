"""Cut parts out of a model, and repair what is left.

importance  what a calibration set says each layer, head, neuron and channel is worth
plan        what to keep: checked, or chosen by importance to reach a target shape
prune       smaller, ordinary checkpoints: fewer layers, heads, neurons, channels
losses      KL at a temperature, hidden states: how far a student is from its teacher
distill     the original teaches what was cut: logits, temperature, hidden states
"""
