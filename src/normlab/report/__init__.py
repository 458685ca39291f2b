"""Self-contained HTML pages of results, made without torch; those of instruments also without the extra
``charts``.

A result imports its page when ``.page()`` is called; the pages of instruments import no laboratory.
"""
