"""Who computes, and which item: namespaces of modules, arguments of calls, keys of items."""
