"""The accelerator's units as tensor functions: each computes what its hardware computes, step by step (§IV)."""
