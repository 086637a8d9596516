"""Training: the loss of token ids and its gradients, to judge those of an engine.

definition.py   the definition, for one sequence
gradients.py    loss_and_gradients, for batches, with arguments checked
"""
