"""Models as graphs of torch.fx, and of torch.export."""

import torch
import transformers
from torch import nn

from tests.torch.zoo.checks import Entry
from tests.torch.zoo.models_transformers import bert, images, texts


class Block(nn.Module):
    """Two convolutions beside which the input passes."""

    def __init__(self, channels):
        super().__init__()
        layers = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
        self.layers = nn.Sequential(*layers, nn.SiLU())

    def forward(self, x):
        return x + self.layers(x)


class Net(nn.Module):
    """A small network of the user's own."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.head = nn.Linear(8, 5)

    def forward(self, pixel_values):
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return torch.softmax(self.head(x.mean((2, 3))) * 3.0, dim=-1)


def traced():
    return torch.fx.symbolic_trace(Net().eval())


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    model = transformers.ResNetModel(config).eval()
    whole = nn.Sequential(model.embedder.embedder, model.embedder.pooler, *model.encoder.stages)
    return Named(torch.fx.symbolic_trace(whole))


class Named(nn.Module):
    """A graph whose argument has the name that images have here."""

    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def forward(self, pixel_values):
        return self.graph(pixel_values)


class Exported(nn.Module):
    """A model as `torch.export` writes it down, for batches of any size."""

    def __init__(self, model, arguments):
        super().__init__()
        batch = torch.export.Dim.AUTO
        shapes = {name: {0: batch} for name in arguments}
        self.graph = torch.export.export(model, (), arguments, dynamic_shapes=shapes).module()

    def forward(self, **arguments):
        return self.graph(**arguments)[0]

    def train(self, mode=True):
        """As it is: exported graphs raise if they are asked."""
        return self


def exported():
    return Exported(bert().eval(), texts(3))


def with_exponential(model):
    """Another function at one node of the graph, which is then written anew."""
    node = next(node for node in model.graph.nodes if node.target is torch.softmax)
    node.target = torch.log_softmax
    model.recompile()


ENTRIES = {
    "traced": Entry(traced, images, {"graph": with_exponential}),
    "traced resnet": Entry(resnet, images),
    "exported bert": Entry(exported, texts),
}
