"""Self-contained HTML pages of results, made without torch; those of instruments also without the extra
``charts``.
"""
