"""The pages of `docs/recipes` print what they say, and what they claim holds, with the real libraries."""

import contextlib
import inspect
import os
import re
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers import warm
from tests.helpers.examples import LIBRARIES, RECIPES, code_and_output
from torchcache2 import CachedDataset, NotCachedError, torchcache

pytestmark = pytest.mark.slow
MARK = "--- the end of the page\n"

# torch 2.4 and 2.5 warn of how the libraries call it.
TORCH_LOAD = "You are using `torch.load` with `weights_only=False`"
# What the libraries warn of themselves, by the start of the message.
WARNINGS = {
    "lightning": [
        "`isinstance(treespec, LeafSpec)` is deprecated",  # it uses a class that torch has deprecated
        "Found 8 module(s) in eval mode",  # the frozen backbone, which is meant
        "Checkpoint directory",  # "… exists and is not empty": the second run goes on in the first one's
        "The 'train_dataloader' does not have many workers",  # said on machines with more processors
        "The 'val_dataloader' does not have many workers",
        "You are using a non-supported Python version",  # a library of Google's, of Python 3.10
        TORCH_LOAD,
    ],
    "accelerate": [],
    "audio": [],
    "distillation": [],
    "latents": [],
    "memory": [],
    "open_clip": [],
    "padding": [],
    "prompts": [],
    "trainer": [TORCH_LOAD],
}

LAYERS = [
    *("0.weight", "0.bias"),
    *("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"),
    *("3.weight", "3.bias"),
]


# A file, because a key covers source code, which the code of a string does not have. The claims are checked
# in the same process, which has trained already.
TAIL = """
import sys
print({mark!r}, end="", flush=True)
print({mark!r}, end="", file=sys.stderr)
from tests.pages.test_recipes import CLAIMS
CLAIMS[{name!r}](sys.modules["__main__"])
"""


@pytest.fixture(scope="module", params=sorted(WARNINGS))
def ran(request, tmp_path_factory):
    """A page's name and output, and its code's run, whose output is followed by `MARK`."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    if name == "open_clip":
        pytest.importorskip("open_clip")  # of the group `zoo`
    code, output = code_and_output(name)
    script = folder / "recipe.py"
    script.write_text(code + TAIL.format(mark=MARK, name=name))
    warned = ["error", *(f"ignore:{message}" for message in WARNINGS[name])]
    environment = {"TORCHCACHE_DISABLE": "", "TMPDIR": str(folder)}
    run = warm.start(script, cwd=folder, env=environment, warnings=warned, imports=LIBRARIES)
    run.poll(300)
    return output, run


def without_accuracy(text):
    # Another processor may round otherwise; the claims say how good it has to be.
    return re.sub(r"(?<=accuracy )\d\.\d\d$", "…", text, flags=re.MULTILINE)


def test_a_recipe_prints_what_its_page_says(ran):
    expected, run = ran
    page, mark, _ = run.out.partition(MARK)
    assert mark, run.err
    assert without_accuracy(page) == without_accuracy(expected)


def test_a_recipe_is_cached_without_a_word(ran):
    _, run = ran
    page, mark, _ = run.err.partition(MARK)
    assert mark, run.err
    assert "torchcache" not in page
    assert "Warning" not in page


def test_what_a_recipe_claims_holds(ran):
    _, run = ran
    run.done()


def test_the_index_lists_every_recipe():
    (listed,) = re.findall(r"```{toctree}\n.*?\n\n(.*?)```", (RECIPES / "index.md").read_text(), re.DOTALL)
    pages = [*WARNINGS, "ray"]  # which `test_ray` runs
    assert sorted(listed.split()) == sorted(pages)
    assert sorted(page.stem for page in RECIPES.glob("*.md")) == sorted(["index", *pages])


# What follows runs at the end of a page's code, and gets its names.


def claims_of_lightning(page):
    whole, path = page.whole, f"{page.folder}/epoch=1.ckpt"
    keys = [*(f"backbone.{name}" for name in LAYERS), "head.weight", "head.bias"]
    assert list(whole.state_dict()) == keys
    checkpoint = torch.load(path, weights_only=True)  # no objects, so no cache
    assert list(checkpoint["state_dict"]) == keys
    assert checkpoint["global_step"] == 48
    assert page.resumed.trainer.global_step == 96
    assert os.path.getsize(path) < stored(whole) + 2 * stored(whole.head) + 50_000
    assert cache(whole.backbone).memory_bytes > 20 * os.path.getsize(path)
    assert whole.trainer.callback_metrics["accuracy"] > 0.7
    assert_optimizes(whole.trainer.optimizers[0], whole.head)
    with without_caches():
        assert_close(page.fit(page.folder, path), whole)

    assert not whole.backbone.training  # Lightning has left it as it was
    batch = page.images[:64]
    assert asked(whole.backbone, whole, batch) == (64, 0, {})
    augmented = batch + 0.1 * torch.rand(batch.shape)
    assert asked(whole.backbone, whole, augmented) == (0, 64, {})
    whole.train()
    assert asked(whole.backbone, whole, batch) == (0, 0, {"training": 64})
    whole.backbone.eval().requires_grad_(True)
    assert asked(whole.backbone, whole, batch) == (0, 64, {})  # batch norm has other statistics now
    assert asked(whole.backbone, whole, batch) == (64, 0, {})
    assert asked(whole.backbone, whole.backbone, batch) == (0, 0, {"grad": 64})

    def hyperparameters(**options):
        class WithBackbone(page.Probe):
            def __init__(self, backbone):
                super().__init__()
                self.save_hyperparameters(**options)

        return list(WithBackbone(page.Backbone()).hparams)

    assert hyperparameters(ignore=["backbone"]) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert hyperparameters() == ["backbone"]


def claims_of_accelerate(page):
    from safetensors.torch import load_file

    whole, backbone = page.whole, page.backbone
    assert list(backbone.state_dict()) == LAYERS
    assert sorted(load_file(f"{page.folder}/2/model.safetensors")) == ["bias", "weight"]
    assert sum(map(torch.numel, whole.parameters())) == 5130
    assert size(f"{page.folder}/2") < 3 * stored(whole) + 50_000
    assert cache(backbone).memory_bytes > 10 * size(f"{page.folder}/2")
    assert {int(state["step"]) for state in page.optimizer.state.values()} == {4 * 24}
    assert_optimizes(page.optimizer, page.resumed)
    with without_caches():
        assert_close(page.fit(page.folder, done=2)[1], whole)

    batch = page.images[:64]
    before = cache(backbone)
    with torch.no_grad():
        assert backbone(batch).dtype == torch.float32  # outside of autocast
    assert cache(backbone).misses - before.misses == 64
    whole.train()
    assert not backbone.training

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        features = backbone(page.images)
        assert features.dtype == torch.bfloat16
        correct = (whole(features).argmax(dim=1) == torch.from_numpy(page.digits.target)).sum()
    assert correct > 0.7 * len(page.images)

    # Not what the page advises, but right: what is around the cache belongs to the call.
    accelerator = page.Accelerator(cpu=True, mixed_precision="bf16")
    instance = torchcache(nn.Sequential(nn.Flatten(), nn.Linear(64, 8)))
    for module in (page.Backbone(), instance):
        prepared = accelerator.prepare(module.requires_grad_(False).eval())
        prepared(batch)
        assert asked(module, prepared, batch) == (64, 0, {})
        assert prepared(batch).dtype == torch.float32


def claims_of_trainer(page):
    from safetensors.torch import load_file

    whole, model = page.whole, page.whole.model
    bert = page.BertModel(model.encoder.bert.config, add_pooling_layer=False)
    keys = [*(f"encoder.bert.{name}" for name in bert.state_dict()), "head.weight", "head.bias"]
    assert list(model.state_dict()) == keys
    path = f"{page.folder}/checkpoint-32"
    assert sorted(load_file(f"{path}/model.safetensors")) == sorted(keys)
    assert size(path) < stored(model) + 2 * stored(model.head) + 100_000
    assert whole.state.global_step == page.resumed.state.global_step == 64
    assert_optimizes(whole.optimizer, model.head)
    with without_caches():
        assert_close(page.fit(tempfile.mkdtemp(), path).model, model)

    encoder = model.train().encoder
    assert not encoder.training
    ids, mask = page.input_ids[:64], page.attention_mask[:64]
    short = mask.sum(dim=1) <= 24
    assert asked(encoder, encoder, ids[short], mask[short]) == (int(short.sum()), 0, {})
    padded = ids[short, :24], mask[short, :24]  # the same texts among shorter ones
    assert asked(encoder, encoder, *padded) == (0, int(short.sum()), {})

    whole_output = torchcache(bert.requires_grad_(False).eval())(ids, mask)
    assert whole_output.last_hidden_state.numel() == 32 * encoder(ids, mask).numel()
    assert len(whole_output) == 1

    del page.Classifier.train  # what the page warns of
    del page.train_set[64:]
    stats = cache(page.fit(tempfile.mkdtemp()).model.encoder)
    assert (stats.hits, stats.misses, stats.bypasses) == (0, 0, {"training": 4 * 64})


def claims_of_audio(page):
    import shutil

    recordings = page.Recordings(page.paths, page.labels)

    def computed(encode=page.encode, dataset=recordings, **options):
        features = CachedDataset(dataset, map=encode, collate_fn=page.pad, **options)
        features.warmup(batch_size=8)
        return features, features.stats().misses, features.stats().bypasses

    for number, path in enumerate(page.paths):
        page.paths[number] = Path(shutil.move(path, path.with_name(f"moved_{path.name}")))
    assert page.run(epochs=1) == 0
    page.labels[0] = 1
    assert page.run(epochs=1) == 1
    features, _, _ = computed()
    rows, label = features[2]
    sound = recordings[2][0]
    alone = page.encoder(sound[None]).last_hidden_state[0]
    assert (rows.dtype, len(rows), label) == (torch.float16, len(alone), 0)
    torch.testing.assert_close(rows, alone.half(), rtol=3e-2, atol=3e-2)

    class Noisy(page.Recordings):
        def __getitem__(self, index):
            sound, label = super().__getitem__(index)
            return sound + 0.1 * torch.randn(len(sound)), label

    assert computed(dataset=Noisy(page.paths, page.labels), views=2)[1:] == (48, {})

    config = page.Wav2Vec2Config(**page.sizes, feat_extract_norm="group")
    page.encoder = page.Wav2Vec2Model(config).eval().requires_grad_(False)
    with pytest.raises(NotCachedError, match="batch"):
        computed()

    def one_by_one(batch):
        sounds, lengths, labels = batch
        rows = zip(sounds, lengths, strict=True)
        return [page.encoder(row[None, :length]).last_hidden_state[0] for row, length in rows], labels

    assert computed(one_by_one)[1:] == (24, {})


def claims_of_latents(page):
    import shutil

    captions, files, vae = page.captions, page.files, page.vae

    def costs(latents, texts):
        assert page.run(epochs=1) == (latents, texts)

    shutil.copy(files / "02.png", files / "new.png")
    page.Image.new("RGB", (48, 16), "blue").save(files / "new.png")
    captions[files / "new.png"] = "a new picture"
    costs(1, 1)  # added
    del captions[files / "02.png"], captions[files / "new.png"]
    costs(0, 0)  # removed
    for path in captions:
        os.utime(path)
    costs(0, 0)  # touched
    shutil.move(files, page.folder / "moved")
    page.captions = {page.folder / "moved" / path.name: text for path, text in captions.items()}
    costs(0, 0)  # moved
    first, caption = next(iter(page.captions.items()))
    page.captions[first] = " ".join(reversed(caption.split()))
    costs(0, 1)  # another order of a caption
    page.captions[first] = caption
    costs(0, 0)  # the old order

    class Enlarged(page.Images):
        scale = 1

        def __getitem__(self, index):
            return super().__getitem__(index).repeat_interleave(self.scale, 1)

    plain, page.Images = page.Images, Enlarged
    costs(15, 0)
    Enlarged.scale = 2
    costs(15, 0)  # another resolution
    Enlarged.scale = 1
    costs(0, 0)  # the old one
    page.Images = plain

    # A comment in the script
    source = inspect.getsource(page.encode_images).replace("\n", "\n    # of the autoencoder\n", 1)
    (page.folder / "edited.py").write_text(source)
    exec(compile(source, page.folder / "edited.py", "exec"), vars(page))
    assert "# of the autoencoder" in inspect.getsource(page.encode_images)
    costs(0, 0)
    from diffusers.models.attention_processor import AttnProcessor

    vae.enable_slicing(), vae.set_attn_processor(AttnProcessor()), vae.enable_gradient_checkpointing()
    with torch.no_grad():
        vae.decoder.conv_in.weight.add_(1)
    costs(0, 0)
    with torch.no_grad():
        vae.encoder.conv_in.weight.add_(1)
    costs(15, 0)
    with torch.no_grad():
        next(page.text_model.parameters()).add_(1)
    costs(0, 15)


def claims_of_prompts(page):
    from transformers import CLIPTextModelWithProjection

    encode, config = page.encode, page.text_model.config
    batch = page.captions[:8]
    plain = encode.__wrapped__(batch)
    assert torch.equal(encode(batch), plain)
    assert asked(encode, encode, tuple(batch)) == (0, 8, {})  # a tuple is not a list
    assert asked(encode, encode, batch[::-1]) == (8, 0, {})
    assert asked(encode, encode, "a red cat") == (0, 1, {})  # a text by itself is one item
    encode.cache_instance.flush()
    assert list(Path(page.folder).glob("*/*.safetensors"))

    namespaces = [encode.cache_instance.module_hash]

    weights = dict(page.text_model.named_parameters())
    norm = next(weights[name] for name in weights if name.endswith("final_layer_norm.bias"))

    def assert_another_namespace():
        encode.cache_instance.refresh()
        namespaces.append(encode.cache_instance.module_hash)
        assert len(set(namespaces)) == len(namespaces)

    assert asked(encode, encode, batch) == (8, 0, {})
    with torch.no_grad():
        norm += 1
    assert asked(encode, encode, batch) == (0, 8, {})
    assert torch.equal(encode(batch), encode.__wrapped__(batch))
    assert not torch.equal(encode(batch), plain)
    page.tokenizer.add_tokens(["teapot"])
    assert_another_namespace()
    page.tokenizer.padding_side = "left"
    assert_another_namespace()

    tokenizer, first = page.tokenizer, page.text_model
    second = CLIPTextModelWithProjection(config).requires_grad_(False).eval()

    def encode_both(prompts, sizes, padding="max_length"):
        tokens = tokenizer(prompts, padding=padding, truncation=True, max_length=16, return_tensors="pt")
        pooled = second(tokens.input_ids, output_hidden_states=True)
        hidden = first(tokens.input_ids, output_hidden_states=True).hidden_states[-2]
        hidden = torch.cat([hidden, pooled.hidden_states[-2]], dim=-1)
        return {"hidden": hidden, "pooled": pooled.text_embeds, "sizes": torch.tensor(sizes)}

    cached = torchcache(item_args=("prompts", "sizes"))(encode_both)
    sizes = [(512, 64 * number) for number in range(8)]
    for part in (slice(0, 6), slice(2, 8), slice(None, None, -1)):
        output, expected = cached(batch[part], sizes[part]), encode_both(batch[part], sizes[part])
        assert list(output) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(output[name], value)
    assert cache(cached).misses == 8
    assert asked(cached, cached, batch, sizes[::-1]) == (0, 8, {})
    longest = ["a red cat at sea", "a cat", "a boat", "a lamp"]
    assert asked(cached, cached, longest, sizes[:4], "longest") == (0, 0, {"batch": 4})


def claims_of_distillation(page):
    plain, teacher = page.plain, page.teacher
    assert torchcache(plain) is plain  # in place
    batch, labels = page.train_set[:64]
    assert asked(teacher, teacher, batch) == (64, 0, {})

    inside = nn.ModuleList([page.student, teacher])
    inside.train()
    assert asked(teacher, teacher, batch) == (0, 0, {"training": 64})
    assert set(map(id, teacher.parameters())) < set(map(id, inside.parameters()))
    teacher.eval()

    @torchcache
    class Common(nn.Linear):
        pass

    learning = Common(64, 10)
    assert asked(learning, learning, batch.flatten(1)) == (0, 0, {"grad": 64})

    @torchcache
    def with_loss(images, labels):
        return {"logits": plain(images), "loss": nn.functional.cross_entropy(plain(images), labels)}

    assert asked(with_loss, with_loss, batch, labels) == (0, 0, {"output": 64})


def claims_of_padding(page):
    encoder = page.Encoder().requires_grad_(False).eval()
    ids = torch.tensor(page.sentences[0])
    short, long = (torch.nn.functional.pad(ids, (0, length - len(ids)))[None] for length in (20, 24))
    outputs = encoder(short, (short != 0).long()), encoder(long, (long != 0).long())
    torch.testing.assert_close(*outputs)
    assert cache(encoder).misses == 2
    lengths = list(map(len, page.sentences))
    assert (min(lengths), max(lengths)) == (5, 20)


def claims_of_open_clip(page):
    assert torch.equal(page.embed(page.captions[:8]), page.embed(page.captions[:8]))
    assert asked(page.model, page.model.encode_image, page.images[:8]) == (0, 8, {})  # not normalised
    counts = [asked(page.embed, page.embed, texts) for texts in (["a zebra"], ["a zebra"], ["a yak"])]
    assert counts == [(0, 1, {}), (1, 0, {}), (0, 1, {})]  # new words in the tokenizer's memo
    tokens = page.tokenizer(["a cat", "a red cat at sea"])
    assert tokens.shape == (2, 16)

    made, _, _ = page.open_clip.create_model_and_transforms("RN50", pretrained=None)
    assert made.training and all(weight.requires_grad for weight in made.parameters())


def claims_of_memory(page):
    backbone, batch = page.backbone, page.images[:64]
    namespace = backbone.cache_instance.module_hash
    backbone._apply(torch.clone)  # as `.cpu()` does where there is a GPU: other storage, the same bytes
    assert asked(backbone, backbone, batch) == (64, 0, {})
    assert backbone.cache_instance.module_hash == namespace
    assert page.freed < stored(backbone) < page.freed + 1000  # which has the buffers too

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.weight = nn.Linear(8, 8), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.layers(x.to(self.weight.device)).to(x.device)

    moving, rows = torchcache(Moving().eval().requires_grad_(False)), torch.rand(64, 8)
    assert asked(moving, moving, rows) == (0, 64, {})
    moving.cache_instance.seal()
    moving.to("meta")
    assert asked(moving, moving, rows) == (64, 0, {})
    with pytest.raises(NotCachedError, match="sealed"):
        moving(rows + 1)


CLAIMS = {
    "open_clip": claims_of_open_clip,
    "distillation": claims_of_distillation,
    "audio": claims_of_audio,
    "latents": claims_of_latents,
    "memory": claims_of_memory,
    "padding": claims_of_padding,
    "prompts": claims_of_prompts,
    "lightning": claims_of_lightning,
    "accelerate": claims_of_accelerate,
    "trainer": claims_of_trainer,
}


def cache(module):
    return module.cache_instance.stats()


def asked(cached, called, *batch):
    """What a call adds to the statistics of a cached module: hits, misses, bypasses."""
    before = cache(cached)
    called(*batch)
    after = cache(cached)
    bypasses = {reason: count - before.bypasses.get(reason, 0) for reason, count in after.bypasses.items()}
    bypasses = {reason: count for reason, count in bypasses.items() if count}
    return after.hits - before.hits, after.misses - before.misses, bypasses


def assert_close(left, right):
    # Without the cache: torch promises no bits between a batch of some items and one of others.
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def assert_optimizes(optimizer, module):
    given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(given) == sorted(map(id, module.parameters()))


def size(folder):
    return sum(file.stat().st_size for file in Path(folder).iterdir())


def stored(module):
    return sum(tensor.nbytes for tensor in module.state_dict().values())


@contextlib.contextmanager
def without_caches():
    os.environ["TORCHCACHE_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCHCACHE_DISABLE"]
