"""The stages: each module has `checks(site)`, which yields findings as it makes them."""
