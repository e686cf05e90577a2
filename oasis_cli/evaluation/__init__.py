"""How good a model is: over anything that yields logits."""
