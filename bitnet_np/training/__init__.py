"""Training: the loss of token ids and its gradients, as spec_grad.py defines them.

gradients.py    loss_and_gradients, for batches, in float32 kernels
"""
