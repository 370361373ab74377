"""`/generate`, this server's own route: whatever a model emits, as typed events."""
