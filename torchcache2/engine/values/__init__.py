"""The kinds of values: how samples, and outputs, become rows, and rows become values again."""
