"""As a script it prints, for each model of the zoo, its namespace before and after a call, as JSON.

It is run as a copy in another folder, with another hash seed.
"""

import json
import logging
import tempfile

from tests.torch.zoo.checks import FIRST, Entry, all_items, seeded, some_items
from tests.torch.zoo.models import ENTRIES, models_diffusers, models_transformers
from torchcache2 import torchcache


class Heard(logging.Handler):
    """Keeps what the library warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def loaded(entry):
    """The same model as it is when it has been loaded from a folder, each time from another one."""

    def build():
        model = entry.build()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return type(model).from_pretrained(folder)

    return Entry(build, entry.inputs, shared=entry.shared)


ALL = ENTRIES | {
    "loaded gpt2": loaded(models_transformers.ENTRIES["gpt2"]),
    "loaded bert": loaded(models_transformers.ENTRIES["bert"]),
    "loaded autoencoder": loaded(models_diffusers.ENTRIES["autoencoder"]),
}


def names(entry):
    model = torchcache(seeded(entry.build), shared_args=entry.shared)
    before = model.cache_instance.module_hash
    model(**some_items(entry, all_items(entry), FIRST))
    return before, model.cache_instance.module_hash


def main():
    heard = Heard()
    logging.getLogger("torchcache2").handlers = [heard]
    found = {}
    for name, entry in ALL.items():
        heard.texts.clear()
        try:
            found[name] = {"names": names(entry)}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        found[name]["warnings"] = list(heard.texts)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
