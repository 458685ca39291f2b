"""Blocks -> one self-contained HTML page. Reads run folders; trains nothing and needs no torch."""
