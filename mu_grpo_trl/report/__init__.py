"""What a run shows: tables and figures."""
