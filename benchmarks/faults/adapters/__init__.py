"""One module for each tool: what it is called with, and which of its checks state which cause."""
