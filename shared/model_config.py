"""model.yaml: what a model is, written by people next to their code. Used through `shared.repository`."""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared import strict_yaml
from shared.errors import ExitCode, StartupError
from shared.mistakes import first_of, sentences, stray_booleans, unknown_keys
from shared.settings import Rows, Tokens, Weight
from shared.strict_yaml import YamlError

CONFIG_FILE = "model.yaml"
_WITHOUT_NETWORK = {"simulated": "runs none", "onnxruntime": "takes it from the .onnx file"}
LEAST_TOKENS = 16
"""Of a key-value cache, per sequence."""
_PLAIN_FILE = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"


class RepositoryError(StartupError):
    """The repository, or one version of a model in it, can't be used. Names the file, from the model's name on."""

    def __init__(self, text: str, exit_code: ExitCode = ExitCode.MODEL_LOAD, detail: str = "") -> None:
        super().__init__(exit_code, text, detail)


class BatchingOverride(BaseModel):
    """`batching:` of model.yaml: what is given replaces the server's default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_rows: Rows | None = None
    max_wait_ms: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)] | None = None
    sizes: tuple[Rows, ...] | None = None
    max_tokens: Tokens | None = None
    weight: Weight | None = None


class OnnxConfig(BaseModel):
    """`onnx:` of model.yaml: how onnxruntime takes memory on a CUDA device; its own names and meanings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu_mem_limit_bytes: Annotated[int, Field(ge=1024 * 1024, le=2**48)] | None = None
    """Of this model's arena on the device. None: no limit of its own."""
    arena_extend_strategy: Literal["kSameAsRequested", "kNextPowerOfTwo"] = "kSameAsRequested"
    """`kSameAsRequested`: grows by what is needed. `kNextPowerOfTwo`: by ever larger steps, and keeps them."""


class GenerationConfig(BaseModel):
    """`generation:` of model.yaml: how much a model that generates text does at a time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_sequences: Annotated[int, Field(ge=1, le=256)] = 16
    """Texts at a time; each beam of a beam search is one."""
    cache_tokens: Annotated[int, Field(ge=LEAST_TOKENS, le=2**31)] | None = None
    """Tokens that the key-value cache holds: texts at a time times the longest one's prompt and answer. None: a whole
    context for each of `max_sequences`, or what a quarter of the worker's memory budget holds, if that is less."""

    @model_validator(mode="after")
    def _agree(self) -> "GenerationConfig":
        if self.cache_tokens is not None and self.cache_tokens < LEAST_TOKENS * self.max_sequences:
            raise ValueError(
                f"cache_tokens is {self.cache_tokens}, which is under {LEAST_TOKENS} for each of max_sequences "
                f"({self.max_sequences}): raise it or lower max_sequences"
            )
        return self


class ModelConfig(BaseModel):
    """model.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pipeline: Annotated[str, Field(pattern=r"^([a-z][a-z0-9_]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$", max_length=200)]
    """A built-in pipeline by name, or the user's own as `module:Class`."""
    backend: Literal["torch", "onnxruntime", "numpy", "simulated"] = "torch"
    network: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=200)] | None = None
    """Backend torch: `module:factory`, a callable that returns the `nn.Module`; in the model's folder or importable."""
    trust: Literal["data", "code"] = "data"
    """`code`: the version's files may run code as they are loaded. Backend torch: allows a `torch.export` archive."""
    onnx: OnnxConfig = OnnxConfig()
    preprocessing: dict[str, Any] = {}
    """The pipeline's own settings; checked by the pipeline's `config_type`."""
    labels: Annotated[str, Field(pattern=_PLAIN_FILE)] | None = None
    """A text file, one label a line: in the version's folder, else in the model's folder."""
    batching: BatchingOverride = BatchingOverride()
    generation: GenerationConfig = GenerationConfig()
    precision: Literal["auto", "fp16", "fp32"] = "auto"
    """`auto`: what `worker.precision` says."""
    load: Literal["at_start", "on_demand"] = "at_start"
    """`at_start`: loaded when the server starts, and kept. `on_demand`: loaded by the first request, and given up for
    another model when `worker.memory_budget_bytes` is used up."""
    cache: bool = True
    """False: never answered from `cache`, since the same input may have different answers."""

    @model_validator(mode="after")
    def _agree(self) -> "ModelConfig":
        if self.backend in _WITHOUT_NETWORK and self.network is not None:
            why = _WITHOUT_NETWORK[self.backend]
            raise ValueError(f"network is given, but backend {self.backend} {why}: remove one of the two")
        if self.backend not in _WITHOUT_NETWORK and self.network is None and not self.may_be_archive:
            raise ValueError(
                f"network is required when backend is {self.backend}: a `module:factory`"
                + (" (only a torch.export archive needs none, and `trust: code`)" if self.backend == "torch" else "")
            )
        if self.backend == "onnxruntime" and self.precision == "fp16":
            raise ValueError(
                "precision is fp16, but backend onnxruntime computes in what the .onnx file holds: remove it"
            )
        return self

    @property
    def needs_torch(self) -> bool:
        """Whether a worker needs torch for it: for its network, or for the pipeline's `normalise` and `head`."""
        return self.backend in ("torch", "onnxruntime")

    @property
    def may_be_archive(self) -> bool:
        """Whether the version's file may be the network itself, not only its weights."""
        return self.backend == "torch" and self.trust == "code"


def read_config(folder: Path) -> ModelConfig:
    """Read and check a model's model.yaml. Raises RepositoryError(BAD_SETTINGS) with file, line and nearest key."""
    return parse_config(config_bytes(folder), folder.name)


def config_bytes(folder: Path) -> bytes:
    """A model's model.yaml as it is now. Raises RepositoryError(BAD_SETTINGS)."""
    try:
        return strict_yaml.read_bytes(folder / CONFIG_FILE, _told(folder.name))
    except YamlError as error:
        raise RepositoryError(error.text, ExitCode.BAD_SETTINGS) from None


def revision_of(raw: bytes) -> str:
    """What tells one content of a model.yaml from another: 16 hexadecimal digits."""
    return hashlib.sha256(raw).hexdigest()[:16]


def document_of(raw: bytes, name: str) -> strict_yaml.Document:
    """The model.yaml of the model `name` with its line numbers. Raises RepositoryError(BAD_SETTINGS)."""
    try:
        return strict_yaml.parse_bytes(raw, _told(name))
    except YamlError as error:
        raise RepositoryError(error.text, ExitCode.BAD_SETTINGS) from None


def parse_config(raw: bytes, name: str) -> ModelConfig:
    """Check the content of a model.yaml; `name` is the model's. Raises as `read_config`."""
    document = document_of(raw, name)
    found = [*unknown_keys(document, ModelConfig), *stray_booleans(document, ModelConfig)]
    if not found:
        try:
            return ModelConfig(**{key: value for key, value in document.data.items() if value is not None})
        except ValidationError as error:
            found = sentences(error, document.where)
    raise RepositoryError(first_of(found), ExitCode.BAD_SETTINGS)


def _told(name: str) -> str:
    return f"{name}/{CONFIG_FILE}"
