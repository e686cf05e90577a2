"""Chains of stages: anything that yields logits opened by one call, recipes, runs and the demo."""
