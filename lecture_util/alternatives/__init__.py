"""Beyond attention: layers whose memory does not grow, and text that is not written left to right.

state             one state a layer, replaced at every step
"""
