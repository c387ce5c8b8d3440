"""Draft heads: small models that read a target's hidden states and guess its next tokens."""
