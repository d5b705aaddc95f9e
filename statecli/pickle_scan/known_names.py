"""Classify a Python name in a pickle: data of an ordinary checkpoint, known harm, or unknown.

Three answers, in this order:

clean     torch's own list (`safe_globals.list_allowed_names`), and names of ordinary checkpoints that only build data:
          containers, numbers, dates, paths, enumerations, configurations. Exact names, because every pattern admits
          more than intended; classes of torch where they are defined (`torch_classes`). Functions may be named and not
          called (`_NAMED_NOT_CALLED`); `call_flow` checks their use.
unsafe    everything else in Python's standard library, functions of torch and numpy, names with a dunder in them, and
          packages whose functions run code: no checkpoint needs these names, and published attacks use them.
unknown   all other names: user classes, which loading imports and runs.

The deny-list alone decides nothing: a name not on the list is unknown, not clean.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache

from statecli.core.dtypes import SCRIPT_STORAGE_DTYPES
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Mention
from statecli.pickle_scan import torch_classes
from statecli.pickle_scan.packed_weights import CPP_CLASSES, is_cpp_class
from statecli.pickles import safe_globals
from statecli.pickles.python2_names import rename_python2


def qualify_names(module: str, words: str) -> list[str]:
    """Return each word of the text as a name of this module."""
    return [f"{module}.{name}" for name in words.split()]


#: Exceptions keep their arguments.
_EXCEPTIONS = (
    "BaseException Exception ArithmeticError AssertionError AttributeError BufferError EOFError FileExistsError"
    " FileNotFoundError FloatingPointError IndexError InterruptedError IOError KeyError KeyboardInterrupt LookupError"
    " MemoryError NotImplementedError OSError OverflowError PermissionError RecursionError RuntimeError StopIteration"
    " SystemExit TimeoutError TypeError UnicodeDecodeError UnicodeEncodeError UnicodeError ValueError ZeroDivisionError"
    " Warning DeprecationWarning FutureWarning RuntimeWarning UserWarning"
)
_TORCHAO_ENUMS = (
    *qualify_names("torchao.quantization.quant_primitives", "MappingType ZeroPointDomain"),
    *qualify_names("torchao.quantization.quantize_.common.kernel_preference", "KernelPreference"),
    *qualify_names("torchao.quantization.quantize_.workflows.float8.float8_packing_format", "Float8PackingFormat"),
    *qualify_names("torchao.quantization.quantize_.workflows.intx.intx_packing_format", "IntxPackingFormat"),
    *qualify_names(
        "torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor",
        "IntxUnpackedToInt8TensorActivationQuantization",
    ),
)
_ZERO_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
#: Enumerations of Python's own modules, by their members' values.
_PYTHON_ENUMS = (
    *qualify_names("calendar", "Day Month"),
    *qualify_names("http", "HTTPMethod HTTPStatus"),
    *qualify_names("inspect", "_ParameterKind"),
    *qualify_names("re", "RegexFlag"),
    *qualify_names("signal", "Signals Handlers"),
    *qualify_names("socket", "AddressFamily SocketKind"),
    *qualify_names("uuid", "SafeUUID"),
)
#: What ordinary training checkpoints hold next to tensors. Each builds a value of its arguments and runs nothing.
DATA_NAMES = frozenset(
    [
        # Python's containers and numbers, as protocols 0 to 5 spell them.
        *qualify_names(
            "builtins", "dict list tuple set frozenset int float bool str bytes bytearray complex object slice range"
        ),
        *qualify_names("builtins", "Ellipsis NotImplemented"),
        *qualify_names("copyreg", "_reconstructor __newobj__ __newobj_ex__"),
        # A call put off; what it would call is looked at.
        *qualify_names("functools", "partial"),
        *qualify_names("collections", "OrderedDict defaultdict Counter deque ChainMap UserDict UserList UserString"),
        *qualify_names("datetime", "datetime date time timedelta timezone"),
        *qualify_names("decimal", "Decimal"),
        *qualify_names("fractions", "Fraction"),
        *qualify_names("uuid", "UUID"),
        *qualify_names("array", "array _array_reconstructor"),
        *qualify_names("zoneinfo", "ZoneInfo ZoneInfo._unpickle"),
        # Members of enumerations that Python before 3.11.3 wrote by the names that their modules have for them.
        *qualify_names("signal", "SIGTERM SIGINT SIGUSR1 SIGUSR2 SIGHUP SIGQUIT SIGKILL SIGALRM SIGCHLD SIGCONT"),
        *qualify_names("signal", "SIG_DFL SIG_IGN"),
        *qualify_names("socket", "AF_INET AF_INET6 AF_UNIX SOCK_STREAM SOCK_DGRAM"),
        *qualify_names("builtins", _EXCEPTIONS),
        *qualify_names("pathlib", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"),
        *qualify_names("pathlib._local", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"),
        # Command lines and configurations, whole or as type annotations in them.
        *qualify_names("argparse", "Namespace"),
        *qualify_names("ipaddress", "IPv4Address IPv4Network IPv4Interface IPv6Address IPv6Network IPv6Interface"),
        *qualify_names("random", "Random"),
        *_PYTHON_ENUMS,
        *qualify_names("types", "SimpleNamespace GenericAlias"),
        *qualify_names("re", "_compile"),
        # Finds a logger by its name, which is how one that a module keeps is pickled.
        *qualify_names("logging", "getLogger"),
        *qualify_names("omegaconf.dictconfig", "DictConfig"),
        *qualify_names("omegaconf.listconfig", "ListConfig"),
        *qualify_names("omegaconf.base", "ContainerMetadata Metadata"),
        *qualify_names(
            "omegaconf.nodes",
            "AnyNode StringNode IntegerNode FloatNode BooleanNode BytesNode PathNode EnumNode InterpolationResultNode",
        ),
        # Arrays and their scalars, before and after numpy 2 moved them.
        *qualify_names("numpy", "ndarray dtype recarray record matrix poly1d"),
        *qualify_names("numpy.matrixlib.defmatrix", "matrix"),
        *qualify_names("numpy._core._internal", "_convert_to_stringdtype_kwargs"),
        *qualify_names("numpy.rec", "recarray record"),
        *qualify_names("numpy.ma", "MaskedArray"),
        *qualify_names("numpy.ma.core", "MaskedArray _mareconstruct"),
        *(
            name
            for core in ("numpy.core", "numpy._core")
            for name in (
                *qualify_names(f"{core}.multiarray", "_reconstruct scalar"),
                *qualify_names(f"{core}.numeric", "_frombuffer"),
            )
        ),
        *qualify_names(
            "numpy",
            "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 longdouble"
            " complex64 complex128 clongdouble str_ bytes_ void datetime64 timedelta64 intc uintc longlong ulonglong",
        ),
        *qualify_names("numpy.random._pickle", "__randomstate_ctor __generator_ctor __bit_generator_ctor"),
        *qualify_names("numpy.random._mt19937", "MT19937"),
        *qualify_names("numpy.random._pcg64", "PCG64 PCG64DXSM"),
        *qualify_names("numpy.random._philox", "Philox"),
        *qualify_names("numpy.random._sfc64", "SFC64"),
        *qualify_names("numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"),
        *qualify_names("numpy.random._bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"),
        # torch, next to what its restricted unpickler admits.
        *qualify_names("torch", "Generator iinfo finfo memory_format layout dtype"),
        *qualify_names("torch._C", "Generator"),
        # `torch.__version__`, which is text.
        *qualify_names("torch.torch_version", "TorchVersion"),
        *qualify_names("torch", "preserve_format contiguous_format channels_last channels_last_3d strided sparse_coo"),
        *qualify_names("torch.distributed.tensor", "DTensor"),
        *qualify_names("torch.distributed.tensor._api", "DTensor"),
        *qualify_names("torch.distributed._tensor.api", "DTensor"),
        *qualify_names("torch.distributed.tensor._dtensor_spec", "DTensorSpec TensorMeta ShardOrderEntry"),
        *qualify_names("torch.distributed._tensor._dtensor_spec", "DTensorSpec TensorMeta"),
        *qualify_names(
            "torch.distributed._tensor.placement_types", "DTensorSpec TensorMeta Shard Replicate Partial _Partial"
        ),
        *qualify_names("torch.distributed.tensor.placement_types", "Shard Replicate Partial _StridedShard"),
        *qualify_names("torch.distributed.device_mesh", "DeviceMesh"),
        *qualify_names("torch.distributed._mesh_layout", "_MeshLayout _FlatLayout"),
        *qualify_names("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
        *qualify_names("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
        *qualify_names("torch.distributed._shard.sharded_tensor.shard", "Shard"),
        *qualify_names(
            "torch.distributed._shard.sharded_tensor.metadata",
            "ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING",
        ),
        *qualify_names("torch.distributed._shard.metadata", "ShardMetadata"),
        *qualify_names("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
        *qualify_names("torch.distributed.remote_device", "_remote_device"),
        # The `.metadata` of a torch.distributed.checkpoint folder.
        *qualify_names(
            "torch.distributed.checkpoint.metadata",
            "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata MetadataIndex"
            " StorageMeta _MEM_FORMAT_ENCODING",
        ),
        *qualify_names("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *qualify_names("torch.masked.maskedtensor.core", "MaskedTensor"),
        # torchao's quantized tensors: what they set is their own attributes; how they were quantized is plain data.
        *qualify_names(
            "torchao.quantization",
            "Float8Tensor Int4Tensor Int4PlainInt32Tensor Int4PreshuffledTensor Int4TilePackedTo4dTensor Int8Tensor"
            " IntxOpaqueTensor IntxUnpackedToInt8Tensor",
        ),
        *qualify_names("torchao.quantization.granularity", "PerTensor PerRow PerBlock PerAxis PerGroup PerToken"),
        *qualify_names("torchao.quantization.quantize_.workflows.float8.float8_tensor", "QuantizeTensorToFloat8Kwargs"),
        *qualify_names("torchao.quantization.quantize_.workflows.int8.int8_tensor", "QuantizeTensorToInt8Kwargs"),
        *qualify_names("torchao.float8.inference", "Float8MMConfig"),
        *qualify_names("torchao.optim.subclass_4bit", "OptimState4bit"),
        *qualify_names("torchao.optim.subclass_8bit", "OptimState8bit"),
        *qualify_names("torchao.optim.subclass_fp8", "OptimStateFp8"),
        *_TORCHAO_ENUMS,
        *qualify_names("torch._dynamo.decorators", "_DimRange"),
        *qualify_names("torch.nested._internal.nested_tensor", "NestedTensor _rebuild_njt"),
        *qualify_names("torch.nn.parameter", "Buffer UninitializedParameter UninitializedBuffer"),
        # TorchScript's pickles.
        *qualify_names("torch", "ScriptObject"),
        *qualify_names("torch", " ".join(SCRIPT_STORAGE_DTYPES)),
        *qualify_names("torch.jit._pickle", "build_intlist build_tensorlist build_doublelist build_boollist"),
        *qualify_names("torch.jit._pickle", "build_tensor_from_id restore_type_tag"),
        # Training loops. TrainingArguments has no __reduce__ and no __setstate__: unpickling it sets its __dict__.
        *qualify_names("transformers.training_args", "TrainingArguments OptimizerNames ParallelMode"),
        *qualify_names("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
        *qualify_names(
            "transformers.trainer_utils",
            "IntervalStrategy SaveStrategy SchedulerType HubStrategy EvaluationStrategy FSDPOption",
        ),
        *qualify_names("transformers.trainer_pt_utils", "AcceleratorConfig"),
        *qualify_names("transformers.debug_utils", "DebugOption"),
        *qualify_names("transformers.trainer_callback", "TrainerState TrainerControl"),
        *qualify_names("transformers.generation.configuration_utils", "GenerationConfig"),
        *qualify_names("transformers.configuration_utils", "PretrainedConfig PreTrainedConfig"),
        *qualify_names("transformers.integrations.deepspeed", "HfDeepSpeedConfig HfTrainerDeepSpeedConfig"),
        *qualify_names("accelerate.state", "PartialState AcceleratorState"),
        *qualify_names(
            "accelerate.utils.dataclasses",
            "DistributedType DynamoBackend ComputeEnvironment PrecisionType TorchDynamoPlugin"
            " GradientAccumulationPlugin DeepSpeedPlugin FullyShardedDataParallelPlugin DataLoaderConfiguration"
            " ParallelismConfig",
        ),
        *qualify_names("accelerate.utils.deepspeed", "HfDeepSpeedConfig"),
        *qualify_names("accelerate.parallelism_config", "ParallelismConfig"),
        # What DeepSpeed keeps next to the shards of its optimizers.
        *qualify_names("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler"),
        *qualify_names("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        # By the names of its members, as Python 3.11.0 to 3.11.2 pickle them; they are not written large.
        *(f"deepspeed.runtime.zero.config.ZeroStageEnum.{stage}" for stage in _ZERO_STAGES),
        *qualify_names("deepspeed.utils.tensor_fragment", "fragment_address"),
        *qualify_names("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
        *(
            f"{module}.AttributeDict"
            for module in ("lightning.fabric.utilities.data", "lightning_fabric.utilities.data")
        ),
        *(
            f"{module}.parsing.AttributeDict"
            for module in ("lightning.pytorch.utilities", "pytorch_lightning.utilities")
        ),
    ]
)
#: Functions that compute on tensors, which a configuration or a whole module keeps.
_TENSOR_FUNCTIONS = frozenset(
    [
        *qualify_names("torch.nn.functional", torch_classes.FUNCTIONAL_FUNCTIONS + " _threshold"),
        *qualify_names("torch._C._nn", torch_classes.FUNCTIONAL_FUNCTIONS),
        *qualify_names("torch._C._VariableFunctionsClass", torch_classes.FUNCTIONAL_FUNCTIONS),
        *qualify_names("torch._C", "_VariableFunctionsClass"),
        *qualify_names("torch", torch_classes.FUNCTIONAL_FUNCTIONS + " rsqrt"),
        *qualify_names("torch.nn.init", torch_classes.INIT_FUNCTIONS),
        # What a GradScaler's defaultdict makes its values with.
        *qualify_names("torch.amp.grad_scaler", "_refresh_per_optimizer_state"),
        *qualify_names("torch.cuda.amp.grad_scaler", "_refresh_per_optimizer_state"),
        # How a metric adds up what several processes have.
        *qualify_names(
            "torchmetrics.utilities.data", "dim_zero_cat dim_zero_max dim_zero_mean dim_zero_min dim_zero_sum"
        ),
        *qualify_names("torchmetrics.metric", "jit_distributed_available"),
        *(
            name
            for module in ("numpy", "torch", "torch._C._VariableFunctionsClass")
            for name in qualify_names(
                module, "mean median sum amax amin max min std var prod argmax argmin exp log sqrt abs"
            )
        ),
        *qualify_names("torch.optim.lr_scheduler", "OneCycleLR._annealing_cos OneCycleLR._annealing_linear"),
        *qualify_names("torch.optim.lr_scheduler", "CyclicLR._triangular_scale_fn CyclicLR._triangular2_scale_fn"),
    ]
)
#: Modules whose parameters have no shape yet, and methods of theirs that are their hooks.
_LAZY_MODULES = frozenset(
    name for name in torch_classes.CLASSES if name.startswith("torch.nn.modules.") and ".Lazy" in name
)
_HOOKS_OF_LAZY_MODULES = ("_infer_parameters", "_lazy_load_hook")
#: What else a checkpoint may name and not call: annotations, callbacks, which old releases of Lightning took for keys,
#: Python's functions of numbers and text.
_NAMED_NOT_CALLED = _TENSOR_FUNCTIONS | frozenset(
    [
        *qualify_names(
            "builtins",
            "abs all any ascii bin callable chr divmod enumerate format hash hex id isinstance issubclass"
            " len max min oct ord pow print repr reversed round sorted sum zip",
        ),
        *qualify_names(
            "math",
            "acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees dist erf erfc exp exp2"
            " expm1 fabs factorial floor fmod frexp fsum gamma gcd hypot isclose isfinite isinf isnan isqrt lcm ldexp"
            " lgamma log log10 log1p log2 modf nextafter perm pow prod radians remainder sin sinh sqrt tan tanh trunc"
            " ulp",
        ),
        *qualify_names(
            "typing",
            "Any Union Optional List Dict Tuple Set FrozenSet Type Sequence Mapping MutableMapping Callable Iterable"
            " Iterator Literal ClassVar Final Annotated",
        ),
        *qualify_names("types", "NoneType EllipsisType NotImplementedType"),
        *qualify_names("torch.optim.swa_utils", "SWALR._cosine_anneal SWALR._linear_anneal"),
        *(f"{module}.{hook}" for module in _LAZY_MODULES for hook in _HOOKS_OF_LAZY_MODULES),
        *(
            f"{root}.callbacks.{where}"
            for root in ("pytorch_lightning", "lightning.pytorch")
            for where in (
                *qualify_names("model_checkpoint", "ModelCheckpoint"),
                *qualify_names("early_stopping", "EarlyStopping"),
                *qualify_names("lr_monitor", "LearningRateMonitor"),
                *qualify_names("progress", "ProgressBar TQDMProgressBar RichProgressBar"),
                *qualify_names("stochastic_weight_avg", "StochasticWeightAveraging"),
                *qualify_names("gradient_accumulation_scheduler", "GradientAccumulationScheduler"),
                *qualify_names("timer", "Timer"),
            )
        ),
    ]
)
#: Modules of functions of tensors and nothing else, as torch names its own in C; not called either.
_TENSOR_FUNCTION_PATTERN = compile_on_use(
    r"torch\._C\.(?:_linalg\.linalg|_fft\.fft|_special\.special)_[a-z0-9_]+", re.ASCII
)
#: Classes of numpy's types. Pickle names them; a type itself it makes by `numpy.dtype`.
_DTYPE_CLASS_PATTERN = compile_on_use(r"numpy\.dtypes\.\w+DType|numpy\.dtype\[\w+\]", re.ASCII)
#: What else keeps what it is given, many of a kind: what they are called is a pattern, and no attribute of them.
#: `__torch__` is not a package of Python: `rules.pickles` refuses the name outside of archives that torch reads as
#: TorchScript, because Python would import a file of that name.
_DATA_PATTERN = compile_on_use(
    r"transformers\.models\.\w+\.configuration_\w+\.[A-Z]\w*Config"
    rf"|__torch__\.(?!torch\.classes\.)[\w.]+|{CPP_CLASSES}",
    re.ASCII,
)
#: Functions of numpy that call their second argument with the first, or the first where it is alone and a class.
GENERATOR_CONSTRUCTORS = tuple(qualify_names("numpy.random._pickle", "__randomstate_ctor __generator_ctor"))
#: Calls its argument where that is a class.
BIT_GENERATOR_CONSTRUCTOR = "numpy.random._pickle.__bit_generator_ctor"
#: The classes that these make an object of.
BIT_GENERATORS = tuple(
    f"numpy.random.{name}"
    for name in ("_mt19937.MT19937", "_pcg64.PCG64", "_pcg64.PCG64DXSM", "_philox.Philox", "_sfc64.SFC64")
)
#: What calls a function that it receives, and at which places of its arguments: a plain name must stand there.
CALLEE_POSITIONS = {
    "functools.partial": (0,),
    "copyreg._reconstructor": (0, 1),
    "copyreg.__newobj__": (0,),
    "copyreg.__newobj_ex__": (0,),
    "torch._tensor._rebuild_from_type_v2": (0, 1),
    "collections.defaultdict": (0,),
    "array._array_reconstructor": (0,),
    "numpy.ma.core._mareconstruct": (0, 1),
    **{f"{core}.multiarray._reconstruct": (0,) for core in ("numpy.core", "numpy._core")},
    **dict.fromkeys(GENERATOR_CONSTRUCTORS, (1,)),
    BIT_GENERATOR_CONSTRUCTOR: (0,),
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": (0,),
    "numpy.random._bit_generator.__pyx_unpickle_SeedSequence": (0,),
}
#: What gives an object that others have as well: nothing may be set on it.
SHARED_OBJECTS = frozenset(
    [
        *qualify_names("logging", "getLogger"),
        *qualify_names("torch.jit._pickle", "build_intlist build_tensorlist build_doublelist build_boollist"),
        *qualify_names("torch.jit._pickle", "build_tensor_from_id restore_type_tag"),
        *qualify_names("torch.serialization", "_get_layout"),
        *qualify_names("accelerate.state", "PartialState AcceleratorState"),
        *qualify_names("zoneinfo", "ZoneInfo ZoneInfo._unpickle"),
        *_PYTHON_ENUMS,
        *qualify_names("transformers.training_args", "OptimizerNames ParallelMode"),
        *qualify_names(
            "transformers.trainer_utils",
            "IntervalStrategy SaveStrategy SchedulerType HubStrategy EvaluationStrategy FSDPOption",
        ),
        *qualify_names("transformers.debug_utils", "DebugOption"),
        *qualify_names(
            "accelerate.utils.dataclasses", "DistributedType DynamoBackend ComputeEnvironment PrecisionType"
        ),
        *qualify_names("torch.amp.grad_scaler", "OptState"),
        *qualify_names("torch.cuda.amp.grad_scaler", "OptState"),
        *qualify_names("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        *qualify_names("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        *qualify_names("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        *_TORCHAO_ENUMS,
    ]
)
#: Functions that pickle itself calls where it has no name for a value: in these calls they do nothing else.
SPELLING_FUNCTIONS = frozenset(
    ["builtins.getattr", "builtins.type", "operator.getitem", "functools.reduce", "operator.or_"]
)
#: Hooks that set attributes, of a name that they are given, of whatever module they are called with.
HOOK_CLASSES = frozenset(
    [
        *qualify_names("torch.nn.utils.weight_norm", "WeightNorm"),
        *qualify_names(
            "torch.nn.utils.spectral_norm", "SpectralNorm SpectralNormLoadStateDictPreHook SpectralNormStateDictHook"
        ),
        *qualify_names("torch.nn.modules.module", "_WrappedHook"),
        *(name for name in torch_classes.CLASSES if name.startswith("torch.nn.utils.prune.")),
    ]
)
#: Enumerations: pickle makes their members by calling them; other classes of torch it makes empty.
_CALLED_CLASSES = frozenset(
    [
        *qualify_names("torch.amp.grad_scaler", "OptState"),
        *qualify_names("torch.cuda.amp.grad_scaler", "OptState"),
    ]
)
#: Constructors here open connections, make folders and look for devices.
_CONFIGURATION_PATTERN = compile_on_use(
    r"(?:transformers|accelerate|omegaconf|deepspeed|torch\.distributed\.(?:device_mesh|_shard\.sharded_tensor))\.(?:\w+\.)*[A-Z]\w*\Z"
)
#: Known of names, and no harm: Python's own, next to what is data.
_HARMLESS = frozenset(qualify_names("operator", "itemgetter"))
#: The name of an enumeration's member, behind that of the enumeration.
_MEMBER = compile_on_use(r"[A-Z][A-Z0-9_]*\Z", re.ASCII)

#: What is known of names, by their beginning; the longest counts.
_HARMS = {
    "__builtin__": "gives access to Python's built-in functions",
    "__builtin__.eval": "runs any Python code",
    "__builtin__.execfile": "runs any Python file",
    "aiohttp": "opens network connections",
    "asyncio": "starts processes and opens network connections",
    "bdb": "runs any Python code",
    "builtins": "gives access to Python's built-in functions",
    "builtins.__import__": "can import any module",
    "builtins.compile": "compiles any Python code",
    "builtins.delattr": "changes any object",
    "builtins.eval": "runs any Python code",
    "builtins.exec": "runs any Python code",
    "builtins.getattr": "reads any attribute, which gives access to any function",
    "builtins.open": "opens any file",
    "builtins.setattr": "changes any object",
    "builtins.type": "creates classes",
    "cProfile": "runs any Python code",
    "celery": "runs tasks",
    "cloudpickle": "unpickles other data without any restriction",
    "code": "runs any Python code",
    "codeop": "compiles any Python code",
    "commands": "runs shell commands",
    "copyreg._inverted_registry": (
        "names a class only by a number (copyreg extension code), so the program that loads the file decides which "
        "class this is"
    ),
    "ctypes": "calls any C function",
    "cgitb": "runs code from its arguments",
    "dill": "unpickles other data without any restriction",
    "distutils": "writes files and runs programs",
    "doctest": "runs any Python code",
    "ensurepip": "installs packages",
    "fickling": "changes how pickles are scanned for code",
    "functools": "wraps and calls any function",
    "gc": "gives access to every object of the process",
    "http": "opens network connections",
    "httplib": "opens network connections",
    "idlelib": "runs any Python code",
    "imaplib": "opens network connections",
    "imp": "can import any module",
    "importlib": "can import any module",
    "inspect": "gives access to the globals of any function",
    "IPython": "runs any Python code",
    "itertools": "calls a function given as an argument",
    "jax": "runs compiled code",
    "joblib": "unpickles other data without any restriction",
    "keras": "loads models that can contain code",
    "lib2to3": "unpickles and runs its argument",
    "linecache": "reads any file",
    "logging": "writes files, and can call any function through its configuration",
    "marshal": "creates code objects",
    "mlflow": "loads models that can contain code",
    "modelscan": "changes how pickles are scanned for code",
    "multiprocessing": "starts processes",
    "nt": "runs shell commands",
    "numpy": "is a function of numpy that no checkpoint needs",
    "numpy.f2py": "runs any Python code",
    "numpy.testing": "runs any Python code",
    "numpy.load": "unpickles any file",
    "numpy.memmap": "overwrites any file",
    "operator": "reads any attribute, which gives access to any function",
    "os": "runs shell commands and changes files",
    "os.system": "runs shell commands",
    "pandas": "evaluates expressions and unpickles files",
    "paramiko": "opens network connections",
    "pdb": "runs any Python code",
    "pickle": "unpickles other data without any restriction",
    # In the name of these, opcodes that do what no pickler writes.
    "pickle.Unpickler.load_setitems": (
        "sets a key or an element twice; torch.save never writes this, and the loaded values may differ from the "
        "values that statecli shows"
    ),
    "pickle.Unpickler.load_appends": (
        "changes bytes after creating them; torch.save never writes this, and statecli did not check the final bytes"
    ),
    "__torch__.torch.classes.aten.OpaqueObject": "unpickles its argument",
    "pickle.Unpickler.load_global": (
        "imports TorchScript classes in a pickle that also uses _rebuild_from_type_v2; in such a pickle, torch.jit "
        "may use another class than the one that the pickle names"
    ),
    "pickle.Unpickler.load_reduce": (
        "calls an integer as if it were a function; torch.jit takes the integer as the number of an import in the "
        "pickle, and calls this import"
    ),
    "pickle.Unpickler.persistent_load": (
        "gets a persistent id from the pickle that torch never writes; a loader may return any object for this id"
    ),
    "_pickle": "unpickles other data without any restriction",
    "picklescan": "changes how pickles are scanned for code",
    "pickletools": "is a part of Python that no checkpoint needs",
    "pip": "installs packages, which can run code",
    "pkgutil": "can import any module",
    "pkg_resources": "can import any module",
    "platform": "runs shell commands",
    "popen2": "runs shell commands",
    "posix": "runs shell commands and changes files",
    "posix.system": "runs shell commands",
    "nt.system": "runs shell commands",
    "profile": "runs any Python code",
    "pty": "runs programs",
    "pydoc": "can import any module and run programs",
    "py_compile": "writes files",
    "requests": "opens network connections",
    "runpy": "runs any Python file",
    "setuptools": "runs programs",
    "shelve": "unpickles any file",
    "shutil": "changes and deletes files",
    "signal": "changes how the process handles signals",
    "site": "runs any Python file",
    "smtplib": "opens network connections",
    "socket": "opens network connections",
    "sqlite3": "opens any database and loads its extensions",
    "ssl": "opens network connections",
    "subprocess": "runs programs",
    "sympy": "evaluates text as Python code",
    "sys": "changes the running Python interpreter",
    "tempfile": "writes files",
    "tensorflow": "loads models that can contain code",
    "test": "runs any Python code",
    "threading": "starts threads",
    "_thread": "starts threads",
    "timeit": "runs any Python code",
    "torch": "is a function of torch that no checkpoint needs",
    "torch._dynamo": "runs any Python code",
    "torch._inductor": "compiles and runs programs",
    "torch._C": "is a part of torch that no checkpoint needs",
    "torch._C.PyTorchFileReader": "opens any file",
    "torch._C.PyTorchFileWriter": "overwrites any file",
    "torch.distributed": "communicates with other processes",
    "torch.fx": "runs code given as text",
    "torch.hub": "downloads and runs code",
    "torch.jit": "loads and runs code",
    "torch.load": "unpickles any file",
    "torch.ops": "loads libraries",
    "torch.package": "loads and runs code",
    "torch.serialization.load": "unpickles any file",
    "torch.storage._load_from_bytes": "unpickles its argument without any restriction",
    "torch.multiprocessing": "starts processes",
    "torch.utils": "is a tool of torch that no checkpoint needs",
    "torch.utils.bottleneck": "runs any Python file",
    "torch.utils.cpp_extension": "compiles and runs programs",
    "torch.utils.collect_env": "runs shell commands",
    "torch.utils.data": "loads data sets, which no checkpoint needs",
    "torch.classes": "loads libraries",
    "torchvision.io": "reads and writes files",
    "trace": "runs any Python code",
    "types": "is a part of Python that no checkpoint needs",
    "types.CodeType": "creates code objects",
    "types.FunctionType": "creates functions from code objects",
    "types.LambdaType": "creates functions from code objects",
    "urllib": "opens network connections",
    "urllib2": "opens network connections",
    "uv": "runs programs",
    "venv": "creates virtual environments, which runs programs",
    "webbrowser": "starts programs and opens network connections",
    "weakref": "calls a function given as an argument",
    "zipimport": "can import any module",
}
#: Parts of the longest of these names.
_MAX_HARM_PARTS = max(name.count(".") for name in _HARMS) + 1
#: Parts of the longest name that is looked up; a pickle may have names of any length.
_MAX_NAME_PARTS = 32
#: Packages of which nothing is clean that no list says is.
_HARMFUL_PACKAGES = frozenset(
    [
        *qualify_names("torch", "utils hub"),
        *qualify_names("torchvision", "io"),
        *qualify_names("scipy", "io"),
        *re.findall(
            r"\w+",
            "IPython aiohttp celery cloudpickle dill distutils fickling imp jax joblib keras lib2to3 mlflow modelscan"
            " pandas paramiko picklescan pip pkg_resources popen2 requests setuptools sympy tensorflow test urllib2 uv"
            " httplib commands _distutils_hack nbformat numba cffi _cffi_backend pexpect ptyprocess sh fabric invoke"
            " psutil jinja2 mako werkzeug django flask nltk yaml ruamel jsonpickle",
        ),
    ]
)
#: Classes of torch.fx, wherever they are imported to: what they hold becomes code when they are loaded.
_GRAPH_CLASSES = frozenset(["GraphModule", "Graph", "CodeGen"])
#: Classes of Python's by which other modules import them.
_ALIASES = {
    "ABCMeta": "creates classes",
    "CDLL": "calls any C function",
    "CodeType": "creates code objects",
    "EnumMeta": "creates classes",
    "EnumType": "creates classes",
    "FileIO": "opens any file",
    "FunctionType": "creates functions from code objects",
    "Popen": "runs programs",
    "PyDLL": "calls any C function",
    "TemporaryDirectory": "writes files",
    "ZipFile": "opens any file",
}
#: Modules in C, and those that are known for them.
_C_MODULE_NAMES = {
    "_operator": "operator",
    "_functools": "functools",
    "_collections": "collections",
    "pathlib._local": "pathlib",
}
#: Python's own modules: those of the Python that runs, and those of older and newer ones.
_STANDARD_LIBRARY = frozenset(
    [
        *sys.stdlib_module_names,
        *re.findall(
            r"\w+",
            "__builtin__ nt posix annotationlib compression asynchat asyncore audioop aifc binhex bsddb cgi cgitb chunk"
            " commands crypt distutils dummy_threading formatter imghdr imp lib2to3 macpath mailcap msilib nis nntplib"
            " nturl2path parser pipes popen2 smtpd sndhdr spwd string sunau symbol telnetlib test tkinter turtledemo uu"
            " winreg xdrlib",
        ),
    ]
)


def is_clean(module: str, name: str, *, called: bool = False) -> bool:
    """Return True if `module.name` only builds checkpoint data, or may be named and is not called."""
    whole = f"{module}.{name}"
    if may_be_named(whole) or _TENSOR_FUNCTION_PATTERN.fullmatch(whole):
        return not called
    # A class's module has all that it imports itself: behind another dot is every function there is.
    if (
        whole in DATA_NAMES
        or whole in safe_globals.list_allowed_names()
        or is_class(whole)
        or ("." not in name and _DATA_PATTERN.fullmatch(whole))
    ):
        return True
    return is_member(whole)


def is_member(whole: str) -> bool:
    """Return whether this is a member of an enumeration found in checkpoints."""
    owner, _, member = whole.rpartition(".")
    return _MEMBER.match(member) is not None and owner.partition(".")[0] != "builtins" and owner in DATA_NAMES


@lru_cache(maxsize=1024)
def is_class(whole: str) -> bool:
    """Return True for a class of torch that only keeps its arguments, by its name in any release."""
    moved = next(
        (new + whole[len(old) :] for old, new in torch_classes.MOVED_MODULES.items() if whole.startswith(old)), whole
    )
    return moved in torch_classes.CLASSES


@lru_cache(maxsize=1024)
def computes_tensors(whole: str) -> bool:
    """Return True for a function from tensors and numbers to tensors and numbers."""
    return whole in _TENSOR_FUNCTIONS or _TENSOR_FUNCTION_PATTERN.fullmatch(whole) is not None


@lru_cache(maxsize=1024)
def may_be_named(whole: str) -> bool:
    """Return True for a name that is clean if not called."""
    return whole in _NAMED_NOT_CALLED or _DTYPE_CLASS_PATTERN.fullmatch(whole) is not None


def is_hook_of_lazy_module(whole: str, method: str) -> bool:
    """Return whether a class of torch without shapes has this method for its hook, found by pickle's getattr."""
    return whole in _LAZY_MODULES and method in _HOOKS_OF_LAZY_MODULES


@lru_cache(maxsize=1024)
def is_configuration(whole: str) -> bool:
    """Return True for a settings class, whose constructor does more than keep its arguments."""
    return _CONFIGURATION_PATTERN.match(whole) is not None


def is_made_empty(whole: str) -> bool:
    """Return True if pickle makes objects of this class empty, and so no pickler writes a call of the class."""
    if whole in _CALLED_CLASSES or whole in SHARED_OBJECTS:
        return False
    return is_class(whole) or is_configuration(whole)


def is_clean_mention(mention: Mention) -> bool:
    """Return True if the name as Python 3 knows it only builds checkpoint data."""
    return is_clean(*rename_python2(mention.module, mention.name), called=mention.called)


def find_harm(mention: Mention) -> str | None:
    """Return the known harm of a name that is not clean or is misused; None if nothing is known."""
    harm = None
    if not is_clean_mention(mention):
        for module, name in (rename_python2(mention.module, mention.name), (mention.module, mention.name)):
            harm = harm or describe_harm(module, name, called=mention.called)
    return harm or mention.misuse


def may_be_harmful(qualified: str) -> bool:
    """Return True if a pickle that names `module.name` may do harm, wherever the module ends and the name begins."""
    parts = qualified.split(".")
    if len(parts) > _MAX_NAME_PARTS:
        return True
    divided = ((".".join(parts[:i]), ".".join(parts[i:])) for i in range(1, len(parts)))
    return any(find_harm(Mention(module, name, 0, called=True)) for module, name in divided)


def describe_harm(module: str, name: str, *, called: bool = False) -> str | None:
    """Return the known harm of a name in a few words; None if unknown. Not for clean names."""
    parts = f"{module}.{name}".partition("[")[0].split(".")
    if get_plain_name(module, name) in _HARMLESS:
        return None
    reason = _look_up_harm(parts)
    if is_cpp_class(".".join(parts)):
        return reason
    if any(part.startswith("__") and part.endswith("__") for part in parts[1:]):
        return reason or "reads any attribute, which gives access to any function"
    if parts[0] in _STANDARD_LIBRARY or (parts[0].startswith("_") and parts[0] not in ("__main__", "__mp_main__")):
        return reason or "is a part of Python that no checkpoint needs"
    if parts[0] in _HARMFUL_PACKAGES or ".".join(parts[:2]) in _HARMFUL_PACKAGES:
        return reason or "runs code or programs"
    return _look_up_alias(name.split(".")) or (
        _describe_torch_harm(parts, name, reason, called) if parts[0] in ("torch", "numpy") else None
    )


def _look_up_harm(parts: list[str]) -> str | None:
    longest = min(len(parts), _MAX_HARM_PARTS)
    return next((_HARMS[prefix] for end in range(longest, 0, -1) if (prefix := ".".join(parts[:end])) in _HARMS), None)


def _look_up_alias(parts: list[str]) -> str | None:
    """Return the harm of a Python class or module imported by another module."""
    for at, part in enumerate(parts):
        if part in _HARMS and part in _STANDARD_LIBRARY and at + 1 < len(parts):
            return _look_up_harm(parts[at:])
    return _ALIASES.get(parts[-1])


def _describe_torch_harm(parts: list[str], name: str, reason: str | None, called: bool) -> str | None:
    """Return the harm of a function of torch or numpy, or of a class if called or known by itself."""
    if parts[0] == "torch" and parts[-1] in _GRAPH_CLASSES:
        return _HARMS["torch.fx"]
    is_class = parts[-1].lstrip("_")[:1].isupper() and "." not in name
    if is_class and reason == _HARMS[parts[0]]:
        return f"is a class of {parts[0]} that no checkpoint needs" if called else None
    return reason


def get_plain_name(module: str, name: str) -> str:
    """Return the `module.name` used in these tables: Python 3's, and the public module of a C module."""
    module, name = rename_python2(module, name)
    return f"{_C_MODULE_NAMES.get(module, module)}.{name}"
