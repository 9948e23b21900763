"""Benchmarks: each module runs both of its sides alternately and ends with one line of JSON. See README.md here."""
