"""All models of the zoo."""

from tests.torch.zoo import models_diffusers, models_graphs, models_transformers

ENTRIES = {
    f"{kind} {name}": entry
    for kind, entries in {
        "transformers": models_transformers.ENTRIES,
        "diffusers": models_diffusers.ENTRIES,
        "graph": models_graphs.ENTRIES,
    }.items()
    for name, entry in entries.items()
}
