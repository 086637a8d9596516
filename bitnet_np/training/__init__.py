"""The loss and its gradients."""
