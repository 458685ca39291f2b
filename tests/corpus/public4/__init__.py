"""The fourth list of public reports, written by two people who had not read how the checks work."""
