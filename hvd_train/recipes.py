"""Named, complete configurations; each docstring gives the command, the machine and the result.

A recipe without a result of ours was not trained to its end.
"""

from collections.abc import Callable
from pathlib import Path

from hvd_train.config import Config
from hvd_train.errors import unknown_name
from hvd_train.plugin import SAMPLES


def digits() -> Config:
    """A small convnet on scanned handwritten digits (1,797 images of 8 x 8 pixels, no download).

    `horovodrun -np 2 hvd-train train digits`: under a minute on two CPU cores, at least 98% top-1.
    """
    return Config(recipe="digits").replace(
        data="digits",
        model="digits-convnet",
        batch_size=None,
        global_batch_size=64,
        optimizer="sgd",
        learning_rate=0.1,
        nesterov=True,
        weight_decay=5e-4,
        epochs=20,
        schedule="cosine",
        warmup_epochs=1,
    )


def cifar10_resnet18_transfer() -> Config:
    """ResNet-18 with weights from ImageNet, of which only a new last layer is trained,
    on CIFAR-10 at 224 pixels.

    `horovodrun -np 2 hvd-train train cifar10-resnet18-transfer --download`: 2 GPUs.
    """
    return Config(recipe="cifar10-resnet18-transfer").replace(
        data="cifar10",
        image_size=224,
        model="resnet18",
        weights="DEFAULT",
        freeze="backbone",
        batch_size=32,
        accumulation_steps=4,
        optimizer="adam",
        learning_rate=0.001,
        weight_decay=0.0,
        epochs=50,
        schedule="cosine",
        warmup_epochs=1,
        precision="auto",
    )


def cifar10_resnet50() -> Config:
    """ResNet-50 from random weights on CIFAR-10.

    `horovodrun -np 4 hvd-train train cifar10-resnet50 --download`: 4 GPUs.
    """
    return Config(recipe="cifar10-resnet50").replace(
        data="cifar10",
        workers=8,
        model="resnet50",
        batch_size=128,
        learning_rate=0.1,
        lr_scaling="linear",
        lr_base_batch=128,
        weight_decay=5e-4,
        epochs=200,
        schedule="cosine",
        warmup_epochs=5,
    )


def imagenet20_vgg19() -> Config:
    """VGG-19 with weights from ImageNet and a new last layer, all of it trained,
    on folders of 20 classes.

    `horovodrun -np 4 hvd-train train imagenet20-vgg19 --data-dir DATA --max-time 2h`: 4 GPUs; no
    figure, since the 20 classes are the user's choice. DATA holds train/, val/ and test/; the
    weights of the lowest validation loss are kept and tested at the end. The learning rate is 1e-4
    times the square root of the number of workers.
    """
    return Config(recipe="imagenet20-vgg19").replace(
        data="folder",
        data_dir=Path("data/imagenet20"),
        model="vgg19",
        weights="DEFAULT",
        batch_size=32,
        optimizer="adam",
        learning_rate=1e-4,
        lr_scaling="sqrt",
        lr_base_batch=32,
        weight_decay=0.0,
        epochs=100,
        schedule="constant",
        best_by="loss",
    )


def imagenet_resnet50() -> Config:
    """ResNet-50 (or another network, by --model) on ImageNet's folders in 90 epochs, with
    the schedule of Goyal et al.

    `horovodrun -np 8 hvd-train train imagenet-resnet50 --data-dir DATA`: 8 GPUs, mixed precision;
    76.1% top-1 published (torchvision, IMAGENET1K_V1). AlexNet and VGG without batch norm need
    --learning-rate 0.01.
    """
    return Config(recipe="imagenet-resnet50").replace(
        data="folder",
        data_dir=Path("data/imagenet"),
        model="resnet50",
        batch_size=208,
        learning_rate=0.1,
        lr_scaling="linear",
        lr_base_batch=256,
        weight_decay=1e-4,
        epochs=90,
        schedule="step",
        decay_epochs=(30, 60),
        warmup_epochs=5,
        precision="auto",
    )


def imagenet_resnet50_modern() -> Config:
    """ResNet-50 on ImageNet's folders by the recipe of torchvision's second set of weights.

    `horovodrun -np 8 hvd-train train imagenet-resnet50-modern --data-dir DATA`: 8 GPUs, mixed
    precision; 80.9% top-1 published (torchvision, IMAGENET1K_V2), but with repeated augmentation,
    which this recipe does not have.
    """
    return Config(recipe="imagenet-resnet50-modern").replace(
        data="folder",
        data_dir=Path("data/imagenet"),
        image_size=176,
        val_crop_size=224,
        val_resize_size=232,
        workers=8,
        augment="trivial",
        random_erasing=0.1,
        mixup=0.2,
        cutmix=1.0,
        model="resnet50",
        batch_size=128,
        optimizer="sgd",
        learning_rate=0.5,
        lr_scaling="linear",
        lr_base_batch=1024,
        momentum=0.9,
        weight_decay=2e-5,
        decay_of="weights",
        label_smoothing=0.1,
        ema_decay=0.99997,
        epochs=600,
        schedule="cosine",
        warmup_epochs=5,
        precision="auto",
    )


def diabetes_regression() -> Config:
    """A small network on measurements of 442 patients, which scikit-learn has.

    `horovodrun -np 2 hvd-train train diabetes-regression`: a few seconds on two CPU cores, mean
    error below 0.46.
    """
    return Config(recipe="diabetes-regression").replace(
        data=f"{SAMPLES}:diabetes",
        model=f"{SAMPLES}:perceptron",
        task="regression",
        batch_size=None,
        global_batch_size=32,
        workers=0,
        optimizer="adam",
        learning_rate=0.003,
        weight_decay=0.0,
        epochs=30,
        schedule="cosine",
        warmup_epochs=0,
    )


def digits_segmentation() -> Config:
    """A small convnet that finds the pixels of a scanned digit, and which digit it is.

    `horovodrun -np 2 hvd-train train digits-segmentation`: under a minute on two CPU cores, a mean
    IoU above 0.9.
    """
    return Config(recipe="digits-segmentation").replace(
        data=f"{SAMPLES}:digit_masks",
        model=f"{SAMPLES}:pixel_network",
        task="segmentation",
        batch_size=None,
        global_batch_size=64,
        workers=0,
        optimizer="adam",
        learning_rate=0.01,
        weight_decay=0.0,
        epochs=20,
        schedule="cosine",
        warmup_epochs=1,
    )


def python_language_model() -> Config:
    """A GRU that predicts the next byte of Python's own help.

    `horovodrun -np 2 hvd-train train python-language-model`: under a minute on two CPU cores, a
    perplexity below 6.
    """
    return Config(recipe="python-language-model").replace(
        data=f"{SAMPLES}:python_topics",
        model=f"{SAMPLES}:ByteModel",
        task="language-model",
        batch_size=None,
        global_batch_size=128,
        workers=0,
        optimizer="adam",
        learning_rate=0.01,
        weight_decay=0.0,
        clip_norm=1.0,
        epochs=5,
        schedule="cosine",
        warmup_epochs=0.2,
    )


def gpt() -> Config:
    """A small GPT on the bytes of Python's help, or on the token files of a folder.

    `horovodrun -np 2 hvd-train train gpt`: four minutes on two CPU cores, a perplexity below 6 for
    each byte. With `--data-dir DATA` it reads tokens from DATA/train.bin and DATA/val.bin: uint16
    numbers of any tokenizer, as nanoGPT's prepare.py writes them.
    """
    return Config(recipe="gpt").replace(
        data=f"{SAMPLES}:token_files",
        model=f"{SAMPLES}:GPT",
        task="language-model",
        batch_size=16,
        global_batch_size=32,
        workers=0,
        optimizer="adamw",
        learning_rate=0.002,
        weight_decay=0.1,
        clip_norm=1.0,
        epochs=2,
        schedule="cosine",
        warmup_epochs=0.2,
    )


_ALL = (
    digits,
    diabetes_regression,
    digits_segmentation,
    python_language_model,
    gpt,
    cifar10_resnet18_transfer,
    cifar10_resnet50,
    imagenet20_vgg19,
    imagenet_resnet50,
    imagenet_resnet50_modern,
)
RECIPES: dict[str, Callable[[], Config]] = {make.__name__.replace("_", "-"): make for make in _ALL}
DEFAULT = "digits"
_CIFAR_CLASSES = {"cifar10": 10, "cifar100": 100}


def plain() -> Config:
    """Return settings for code of the user's own: SGD with momentum, at
    a constant learning rate.
    """
    return Config().replace(
        batch_size=None, global_batch_size=64, schedule="constant", weight_decay=0.0
    )


def get(name: str) -> Config:
    """Return the config of a recipe.

    Raises UsageError, with the nearest name, for an unknown name.
    """
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]()


def trial(config: Config) -> Config:
    """Return a minute's trial of a recipe: one epoch, and in place of images in files
    three steps on random ones.
    """
    config = config.replace(epochs=1, warmup_epochs=0.0, recipe=f"try-{config.recipe}")
    if config == (random := on_random_images(config, 12)):
        return config
    return random.replace(weights=None, batch_size=None, global_batch_size=4, accumulation_steps=1)


def on_random_images(config: Config, count: int) -> Config:
    """Return the config with `count` random images in place of files of images.

    Digits and other tasks stay.
    """
    data = config.data.data
    if config.model.task != "classification" or data == "digits":
        return config
    size = 32 if data in _CIFAR_CLASSES else 224
    return config.replace(
        data="synthetic",
        synthetic_samples=count,
        synthetic_classes=_CIFAR_CLASSES.get(data, config.data.synthetic_classes),
        image_size=config.data.image_size or size,
        val_crop_size=None,
        val_resize_size=None,
        augment="standard",
        random_erasing=0.0,
        download=False,
        data_dir=None,
    )
