"""What mutations.py and logits_only.py judge: an engine, and faults for it."""
