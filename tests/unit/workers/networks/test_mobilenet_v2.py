import torch

from workers.networks.mobilenet_v2 import mobilenet_v2


def test_it_has_the_published_size_and_names() -> None:
    with torch.device("meta"):
        network = mobilenet_v2()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert sum(parameter.numel() for parameter in network.parameters()) == 3_504_872
    assert len(shapes) == 314
    assert shapes["features.0.0.weight"] == (32, 3, 3, 3)
    assert shapes["features.1.conv.1.weight"] == (16, 32, 1, 1)
    assert shapes["features.2.conv.1.0.weight"] == (96, 1, 3, 3)
    assert shapes["features.17.conv.3.running_var"] == (320,)
    assert shapes["classifier.1.weight"] == (1000, 1280)


def test_logits_for_any_image_size() -> None:
    network = mobilenet_v2().eval()
    with torch.inference_mode():
        for size in (32, 33, 47):
            assert network(torch.zeros(2, 3, size, size)).shape == (2, 1000)
