"""The subjects of mutations.py and logits_only.py: a small engine (engine.py), and faults for it (faults.py)."""
