"""Every on-disk schema: what is written, what is checked on reading, and how writes stay atomic."""
