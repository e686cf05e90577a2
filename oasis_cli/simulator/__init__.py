"""The accelerator: how long a program takes on it, what it costs, and what it computes, bit for bit."""
