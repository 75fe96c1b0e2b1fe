"""Plants small faults in the package, one at a time, and shows which of them no fast test finds."""
