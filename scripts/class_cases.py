"""Classes that people train, and the tiny models and batches of each, for scripts/class_sweep.py."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from hfscale._compat.transformers.classes import classes_by_config
from hfscale.extras.pictures.picture_configs import with_pictures
from hfscale.extras.pictures.picture_parity import PictureCase
from hfscale.models.clone import HIDDEN, LAYERS, VOCABULARY, tiny_clone
from hfscale.testing import plain
from hfscale.testing.parity import Batch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.families import CHANGES
from tests.plain_cases import UserLossCase

SIDE = 32
# Families that cannot be given a text alone, although their classes do not say so.
ALWAYS_PICTURED = (
    "git",
    "idefics",
    "kosmos-2",
    "pi0",
    "pix2struct",
    "pp_formulanet",
    "vision-encoder-decoder",
)
REWARD = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "starcoder2",
    "stablelm",
]


def sequence_classification(
    case: plain.PlainCase, generator: torch.Generator, length: int
) -> Batch:
    """Texts, each with a class, and with one end, which encoder-decoders classify by."""
    batch = plain.sequence_classification(case, generator, length)
    end = getattr(case.config.get_text_config(), "eos_token_id", None)
    if not isinstance(end, int) or not case.config.is_encoder_decoder:
        return batch
    ids = batch["input_ids"]
    ids = ids.where(ids != end, ids % end + end + 1 if end < 10 else ids % 10 + 4)
    ids.scatter_(1, batch["attention_mask"].sum(1, keepdim=True) - 1, end)
    return {**batch, "input_ids": ids}


def question_answering(case: plain.PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Texts, each with the first and the last token of its answer."""
    batch = sequence_classification(case, generator, length)
    del batch["labels"]
    places = torch.randint(0, length - 3, (2, case.rows), generator=generator).sort(0).values
    return {**batch, "start_positions": places[0], "end_positions": places[1]}


def token_classification(case: plain.PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Texts with a class for most tokens, and for BROS with the place of each on a page."""
    batch = plain.token_classification(case, generator, length)
    if case.config.model_type == "bros":
        batch["bbox"] = torch.rand(case.rows, length, 4, dtype=torch.float64, generator=generator)
    return batch


def masked_tokens(case: plain.PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Tokens that are to be told; Perceiver's decoder tells as many as it has positions."""
    known = case.config.model_type != "perceiver"
    return plain.causal_lm(
        case, generator, length if known else case.config.max_position_embeddings
    )


def texts(case: plain.PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Texts alone."""
    batch = sequence_classification(case, generator, length)
    del batch["labels"]
    return batch


def images(case: plain.PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Pictures, each with a class."""
    config = case.config
    labels = torch.randint(0, config.num_labels, (case.rows,), generator=generator)
    if config.model_type == "imagegpt":  # colors of pixels, one after the other
        ids = torch.randint(0, config.vocab_size - 1, (case.rows, 16), generator=generator)
        return {"input_ids": ids, "labels": labels}
    if config.model_type == "siglip2":  # patches, of pictures with sides of their own
        return {**_patches(config.vision_config, case.rows, generator), "labels": labels}
    channels = getattr(config, "num_channels", None) or getattr(
        config.get_text_config(), "num_channels", 3
    )
    side = getattr(config, "image_size", None) or getattr(
        getattr(config, "vision_config", None), "image_size", SIDE
    )
    side = side if isinstance(side, int) else side[0]
    pictures = torch.randn(
        case.rows, channels, side, side, dtype=torch.float64, generator=generator
    )
    return {"pixel_values": pictures, "labels": labels}


def _patches(config: Any, rows: int, generator: torch.Generator) -> Batch:
    """Pictures of 4 x 4 and of 3 x 5 patches, flat, with room for more."""
    sides = torch.tensor([[4, 4], [3, 5]])[torch.arange(rows) % 2]
    room = sides.prod(1).max() + 2
    width = config.num_channels * config.patch_size**2
    return {
        "pixel_values": torch.randn(rows, room, width, dtype=torch.float64, generator=generator),
        "pixel_attention_mask": (torch.arange(room) < sides.prod(1)[:, None]).long(),
        "spatial_shapes": sides,
    }


def _sound(case: plain.PlainCase, generator: torch.Generator, length: int) -> Batch:
    config = case.config
    if config.model_type == "whisper":
        shape: tuple[int, ...] = (config.num_mel_bins, 2 * config.max_source_positions)
        name = "input_features"
    elif config.model_type == "audio-spectrogram-transformer":
        shape = (config.max_length, config.num_mel_bins)
        name = "input_values"
    elif getattr(config, "feature_projection_input_dim", None):
        shape = (32 + 2 * length, config.feature_projection_input_dim)
        name = "input_features"
    elif hasattr(config, "conv_dim"):
        shape = (400 + 16 * length,)
        name = "input_values"
    else:
        encoder = getattr(config, "encoder_config", config)
        bins = getattr(encoder, "num_mel_bins", None) or getattr(encoder, "input_dim", 80)
        shape = (128 + 8 * length, bins)
        name = "input_features"
    return {name: torch.randn((case.rows, *shape), dtype=torch.float64, generator=generator)}


def sounds(case: plain.PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Sounds, each with a class."""
    labels = torch.randint(0, case.config.num_labels, (case.rows,), generator=generator)
    return {**_sound(case, generator, length), "labels": labels}


def transcripts(case: plain.PlainCase, generator: torch.Generator, length: int) -> Batch:
    """Sounds, each with what is said in it."""
    vocabulary = case.config.get_text_config().vocab_size
    labels = torch.randint(1, vocabulary - 1, (case.rows, 3), generator=generator)
    return {**_sound(case, generator, length), "labels": labels}


@dataclass
class RewardCase(plain.PlainCase):
    """Pairs of texts, of which the first half are to be scored higher (Ouyang et al. 2022); by a plain loop."""

    make_batch: plain.Maker = texts
    rows: int = 4

    def loss_of(self, model: Any, batch: Batch) -> Tensor:
        """The mean over its pairs."""
        total, count = preferences(model(**batch), batch)
        return total / count

    def by_step(self) -> UserLossCase:
        """The same by ``train_step``, with a loss of the user's own."""
        case = UserLossCase(
            self.config, auto_class=self.auto_class, make_batch=self.make_batch, rows=self.rows
        )
        return replace(case, loss_fn=preferences)


def preferences(outputs: Any, batch: Batch) -> tuple[Tensor, int]:
    """Minus the logs of the probabilities that the better ones win, and how many pairs there are."""
    better, worse = outputs.logits[:, 0].chunk(2)
    return -torch.nn.functional.logsigmoid(better - worse).sum(), len(better)


@dataclass
class EmbeddingCase(plain.PlainCase):
    """Texts whose means of hidden states are to be told apart: a contrast over the batch."""

    make_batch: plain.Maker = texts
    rows: int = 4

    def loss_of(self, model: Any, batch: Batch) -> Tensor:
        """Cross entropy over similarities of the first half with the second."""
        states = model(**batch).last_hidden_state
        mask = batch["attention_mask"][:, :, None].to(states.dtype)
        means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        first, second = means.chunk(2)
        return torch.nn.functional.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


@dataclass
class OwnLossPictureCase(PictureCase, plain.OwnLossCase):
    """Texts with pictures by ``train_step``: an encoder and a decoder, whose loss is a mean over labels."""


@dataclass(frozen=True)
class Kind:
    """One class of models.

    Attributes:
        title: of its table.
        auto: name of the Auto class.
        mapping: name of the host's table of its families.
        maker: of batches.
        changes: to clones, one after the other until stock code trains one.
        task: PEFT's name of it.
        families: instead of those of the table.
        recipe: whether it is trained by the usual recipe: the tower frozen, LoRA in the text, the projector whole.
    """

    title: str
    auto: str
    mapping: str
    maker: plain.Maker
    changes: tuple[dict[str, Any], ...] = ({},)
    task: str | None = None
    families: tuple[str, ...] = ()
    make: Callable[..., Any] = plain.PlainCase
    recipe: bool = False

    def names(self) -> list[str]:
        """Its families."""
        return sorted(self.families or getattr(modeling_auto, self.mapping))

    @property
    def auto_class(self) -> Any:
        """The Auto class."""
        return getattr(transformers, self.auto)


_PAD = (
    {},
    {"pad_token_id": 0},
    {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
)
_SEQ2SEQ = (
    {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 3},
    {"decoder_start_token_id": 0, "pad_token_id": 0},
)
_SOUND = {
    "vocab_size": 67,
    "conv_dim": (HIDDEN, HIDDEN, HIDDEN),
    "conv_kernel": (8, 4, 4),
    "conv_stride": (4, 4, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "apply_spec_augment": False,
    "tdnn_dim": (HIDDEN,) * 3,
    "tdnn_kernel": (3, 3, 1),
    "tdnn_dilation": (1, 1, 1),
    "xvector_output_dim": HIDDEN,
    "output_hidden_size": HIDDEN,
    "classifier_proj_size": HIDDEN,
}


_STAGES = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
_SWIN = {"window_size": 2, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4]}
# What a family needs besides.
FAMILIES: dict[str, dict[str, Any]] = {
    "bros": {"dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2, "dim_bbox_projection": 8},
    "canine": {"vocab_size": 60, "num_hash_buckets": 64, "type_vocab_size": 4, "downsampling_rate": 2},
    "esm": {"mask_token_id": 4, "pad_token_id": 1, "vocab_size": VOCABULARY},
    "esmc": {"mask_token_id": 4},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "mobilebert": {"embedding_size": 16},
    "layoutlmv3": {"input_size": 32, "coordinate_size": 4, "shape_size": 8, "visual_embed": False},
    "lilt": {"channel_shrink_ratio": 4, "hidden_size": 48},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "mluke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8, "d_model": 32},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "t5": {"decoder_start_token_id": 0, "eos_token_id": 1},
    "neomme": {"head_dim": 16},
    "textnet": {
        "stem_out_channels": 8, "hidden_sizes": [8, 8, 16, 16, 16],
        "conv_layer_kernel_sizes": [[[3, 3]], [[3, 3], [1, 3]], [[3, 3]], [[3, 1]]],
        "conv_layer_strides": [[1], [2, 1], [2], [2]],
    },
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        for kind in ("full_attention", "sliding_attention")
    }},
    **dict.fromkeys(("bit", "convnext", "convnextv2", "resnet", "regnet"), _STAGES),
    "bit": {**_STAGES, "num_groups": 4},
    "regnet": {**_STAGES, "groups_width": 8},
    "cvt": {"embed_dim": [16, 32, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3],
        "num_stages": 3, "drop_path_rate": [0.0, 0.0, 0.0], "cls_token": [False, False, True]},
    **dict.fromkeys(("donut-swin", "swin", "swinv2"), _SWIN),
    "efficientnet": {
        "width_coefficient": 0.25, "depth_coefficient": 0.3, "num_block_repeats": [1] * 7,
        "hidden_dim": 320,
    },
    "focalnet": {"embed_dim": 16, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]},
    "hgnet_v2": {
        "embedding_size": 16, "hidden_sizes": [16, 32, 32, 32], "stem_channels": [3, 16, 16], "depths": [1, 1, 1, 1],
        "stage_in_channels": [16, 16, 32, 32], "stage_mid_channels": [16, 16, 16, 16],
        "stage_out_channels": [16, 32, 32, 32], "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "hiera": {"embed_dim": 8, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
    "levit": {
        "hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8],
        "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 4, 4, 2, 2]],
    },
    "poolformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]},
    "pvt": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 2, 4]},
    "pvt_v2": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 2, 4]},
    "segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 2, 4]},
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32]},
}  # fmt: skip
# In the first step one of two data ranks has no picture, in the second one microbatch.
_TEXT_ALONE = frozenset({(0, 1, 0), (0, 1, 1), (1, 0, 1)})
# Families whose towers have a config of their own.
_TOWERED = ("clip", "metaclip_2", "siglip", "siglip2")


def _mapping(name: str) -> str:
    return f"MODEL_FOR_{name}_MAPPING_NAMES"


KINDS: dict[str, Kind] = {
    "sequences": Kind(
        "Texts that are classified", "AutoModelForSequenceClassification", _mapping("SEQUENCE_CLASSIFICATION"),
        sequence_classification, _PAD, "SEQ_CLS",
    ),
    "reward": Kind(
        "Reward models: pairs of texts", "AutoModelForSequenceClassification", "", texts,
        ({"num_labels": 1, "pad_token_id": 0},), "SEQ_CLS", tuple(REWARD), RewardCase,
    ),
    "tokens": Kind(
        "Tokens that are classified", "AutoModelForTokenClassification", _mapping("TOKEN_CLASSIFICATION"),
        token_classification, _PAD, "TOKEN_CLS",
    ),
    "answers": Kind(
        "Question answering", "AutoModelForQuestionAnswering", _mapping("QUESTION_ANSWERING"),
        question_answering, _PAD, "QUESTION_ANS",
    ),
    "masked": Kind("Masked tokens", "AutoModelForMaskedLM", _mapping("MASKED_LM"), masked_tokens, _PAD),
    "embeddings": Kind(
        "Embeddings of texts", "AutoModelForTextEncoding", _mapping("TEXT_ENCODING"), texts, _PAD,
        "FEATURE_EXTRACTION", (), EmbeddingCase,
    ),
    "translation": Kind(
        "Sequence to sequence", "AutoModelForSeq2SeqLM", _mapping("SEQ_TO_SEQ_CAUSAL_LM"),
        plain.sequence_to_sequence, _SEQ2SEQ, "SEQ_2_SEQ_LM",
    ),
    "images": Kind(
        "Images", "AutoModelForImageClassification", _mapping("IMAGE_CLASSIFICATION"), images,
        ({"image_size": SIDE}, {}),
    ),
    "audio": Kind(
        "Sounds that are classified", "AutoModelForAudioClassification", _mapping("AUDIO_CLASSIFICATION"), sounds,
        (_SOUND, {"num_mel_bins": 8, "max_source_positions": 20, "max_length": 64}),
    ),
    "ctc": Kind("Speech, by CTC", "AutoModelForCTC", _mapping("CTC"), transcripts, (_SOUND, {})),
    "pictures": Kind(
        "Vision-language models", "AutoModelForImageTextToText", _mapping("IMAGE_TEXT_TO_TEXT"), plain.causal_lm,
    ),
    "recipe": Kind(
        "Vision-language models by the usual recipe", "AutoModelForImageTextToText", _mapping("IMAGE_TEXT_TO_TEXT"),
        plain.causal_lm, recipe=True,
    ),
}  # fmt: skip


def configs(kind: Kind, family: str, layers: int = LAYERS) -> list[Any]:
    """Configs of tiny models of a family, to be tried one after the other."""
    if kind.auto == "AutoModelForImageTextToText":
        return [with_pictures(family)]
    found = []
    error = None
    for changes in kind.changes:
        base = AutoConfig.for_model(family)
        known = base.to_dict()
        wanted = {
            name: value for name, value in changes.items() if name in known or name == "num_labels"
        }
        own = CHANGES.get(family, {}) if kind.task or kind.auto == "AutoModelForMaskedLM" else {}
        own = {
            name: value for name, value in own.items() if layers == LAYERS or "layer" not in name
        }
        try:
            config = tiny_clone(
                base, layers=layers, **{**FAMILIES.get(family, {}), **own, **wanted}
            )
        except Exception as failure:  # a config that checks its numbers against one another
            error = failure
            continue
        if "pad_token_id" in changes:
            config.get_text_config().pad_token_id = changes["pad_token_id"]
        if family in _TOWERED:
            config.vision_config.image_size, config.vision_config.patch_size = SIDE, 8
        config.architectures = []  # the Auto class looks for its own among them
        found.append(config)
    if not found and error is not None:
        raise error
    return found


def case_of(kind: Kind, config: Any) -> plain.PlainCase | PictureCase:
    """What is run of a config."""
    if kind.auto == "AutoModelForImageTextToText":
        forward = inspect.signature(classes_by_config(kind.auto_class)[type(config)].forward)
        pixels = forward.parameters.get("pixel_values")
        asked = pixels is not None and pixels.default is inspect.Parameter.empty
        asked = asked or config.model_type in ALWAYS_PICTURED
        return PictureCase(config, text_alone=frozenset() if asked else _TEXT_ALONE)
    # An Auto class may take a part of the config, which it does not know when it is reloaded.
    with torch.device("meta"):
        model = kind.auto_class.from_config(config)
    case: plain.PlainCase = kind.make(model.config, auto_class=type(model), make_batch=kind.maker)
    return case
