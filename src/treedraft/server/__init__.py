"""HTTP in, text out."""
