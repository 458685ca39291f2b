"""From recipe names to configurations: the grammar, what a name resolves to, and parts from plug-ins."""
