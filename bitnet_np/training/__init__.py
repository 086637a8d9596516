"""Training: the loss of token ids and its gradients, as spec.py of this folder defines them.

gradients.py    loss_and_gradients, for batches, in float32 kernels
"""
