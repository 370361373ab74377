"""The deployment configuration: one schema, one loader. No torch."""
