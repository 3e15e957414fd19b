"""What `omni-live bench` measures, and with what. Each bench starts its own server, or none."""
