"""What a Python name in a pickle is: data of an ordinary checkpoint, known for harm, or unknown.

Three answers, asked in this order:

clean     torch's own list (`_globals.allowed`), and names here that ordinary checkpoints have and that only build data:
          containers, numbers, dates, paths, enumerations, configurations. Exact names, since every pattern lets more
          in than was meant; classes of torch where they are defined (`_classes`). Functions may be named and not called
          (`_NAMED`); what is done with the rest is `_flow`'s.
unsafe    everything else in Python's standard library, functions of torch and numpy, names with a dunder in them, and
          packages whose functions run code: what a checkpoint has no use for and published attacks are made of.
unknown   all the rest: somebody's classes, which loading imports and runs.

The deny-list alone decides nothing: what it lacks is unknown, not clean.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache

from statecli.core.dtypes import SCRIPT_STORAGE_DTYPES
from statecli.pickle_scan import torch_classes
from statecli.pickles import safe_globals


def names(module: str, names: str) -> list[str]:
    """Each of the names in a text, as that of this module."""
    return [f"{module}.{name}" for name in names.split()]


#: Exceptions keep their arguments.
_EXCEPTIONS = (
    "BaseException Exception ArithmeticError AssertionError AttributeError BufferError EOFError FileExistsError"
    " FileNotFoundError FloatingPointError IndexError InterruptedError IOError KeyError KeyboardInterrupt LookupError"
    " MemoryError NotImplementedError OSError OverflowError PermissionError RecursionError RuntimeError StopIteration"
    " SystemExit TimeoutError TypeError UnicodeDecodeError UnicodeEncodeError UnicodeError ValueError ZeroDivisionError"
    " Warning DeprecationWarning FutureWarning RuntimeWarning UserWarning"
)
_TORCHAO_ENUMS = (
    *names("torchao.quantization.quant_primitives", "MappingType ZeroPointDomain"),
    *names("torchao.quantization.quantize_.common.kernel_preference", "KernelPreference"),
    *names("torchao.quantization.quantize_.workflows.float8.float8_packing_format", "Float8PackingFormat"),
    *names("torchao.quantization.quantize_.workflows.intx.intx_packing_format", "IntxPackingFormat"),
    *names(
        "torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor",
        "IntxUnpackedToInt8TensorActivationQuantization",
    ),
)
_ZERO_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
#: Enumerations of Python's own modules, by their members' values.
_PYTHON_ENUMS = (
    *names("calendar", "Day Month"),
    *names("http", "HTTPMethod HTTPStatus"),
    *names("inspect", "_ParameterKind"),
    *names("re", "RegexFlag"),
    *names("signal", "Signals Handlers"),
    *names("socket", "AddressFamily SocketKind"),
    *names("uuid", "SafeUUID"),
)
#: What ordinary training checkpoints hold beside tensors. Each builds a value of its arguments and runs nothing.
DATA = frozenset(
    [
        # Python's containers and numbers, as protocols 0 to 5 spell them.
        *names(
            "builtins", "dict list tuple set frozenset int float bool str bytes bytearray complex object slice range"
        ),
        *names("builtins", "Ellipsis NotImplemented"),
        *names("copyreg", "_reconstructor __newobj__ __newobj_ex__"),
        # A call put off; what it would call is looked at.
        *names("functools", "partial"),
        *names("collections", "OrderedDict defaultdict Counter deque ChainMap UserDict UserList UserString"),
        *names("datetime", "datetime date time timedelta timezone"),
        *names("decimal", "Decimal"),
        *names("fractions", "Fraction"),
        *names("uuid", "UUID"),
        *names("array", "array _array_reconstructor"),
        *names("zoneinfo", "ZoneInfo ZoneInfo._unpickle"),
        # Members of enumerations that Python before 3.11.3 wrote by the names that their modules have for them.
        *names("signal", "SIGTERM SIGINT SIGUSR1 SIGUSR2 SIGHUP SIGQUIT SIGKILL SIGALRM SIGCHLD SIGCONT"),
        *names("signal", "SIG_DFL SIG_IGN"),
        *names("socket", "AF_INET AF_INET6 AF_UNIX SOCK_STREAM SOCK_DGRAM"),
        *names("builtins", _EXCEPTIONS),
        *names("pathlib", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"),
        *names("pathlib._local", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"),
        # Command lines and configurations, whole or as type annotations in them.
        *names("argparse", "Namespace"),
        *names("ipaddress", "IPv4Address IPv4Network IPv4Interface IPv6Address IPv6Network IPv6Interface"),
        *names("random", "Random"),
        *_PYTHON_ENUMS,
        *names("types", "SimpleNamespace GenericAlias"),
        *names("re", "_compile"),
        # Finds a logger by its name, which is how one that a module keeps is pickled.
        *names("logging", "getLogger"),
        *names("omegaconf.dictconfig", "DictConfig"),
        *names("omegaconf.listconfig", "ListConfig"),
        *names("omegaconf.base", "ContainerMetadata Metadata"),
        *names(
            "omegaconf.nodes",
            "AnyNode StringNode IntegerNode FloatNode BooleanNode BytesNode PathNode EnumNode InterpolationResultNode",
        ),
        # Arrays and their scalars, before and after numpy 2 moved them.
        *names("numpy", "ndarray dtype recarray record matrix poly1d"),
        *names("numpy.matrixlib.defmatrix", "matrix"),
        *names("numpy._core._internal", "_convert_to_stringdtype_kwargs"),
        *names("numpy.rec", "recarray record"),
        *names("numpy.ma", "MaskedArray"),
        *names("numpy.ma.core", "MaskedArray _mareconstruct"),
        *(
            name
            for core in ("numpy.core", "numpy._core")
            for name in (
                *names(f"{core}.multiarray", "_reconstruct scalar"),
                *names(f"{core}.numeric", "_frombuffer"),
            )
        ),
        *names(
            "numpy",
            "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 longdouble"
            " complex64 complex128 clongdouble str_ bytes_ void datetime64 timedelta64 intc uintc longlong ulonglong",
        ),
        *names("numpy.random._pickle", "__randomstate_ctor __generator_ctor __bit_generator_ctor"),
        *names("numpy.random._mt19937", "MT19937"),
        *names("numpy.random._pcg64", "PCG64 PCG64DXSM"),
        *names("numpy.random._philox", "Philox"),
        *names("numpy.random._sfc64", "SFC64"),
        *names("numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"),
        *names("numpy.random._bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"),
        # torch, beside what its restricted unpickler admits.
        *names("torch", "Generator iinfo finfo memory_format layout dtype"),
        *names("torch._C", "Generator"),
        # `torch.__version__`, which is text.
        *names("torch.torch_version", "TorchVersion"),
        *names("torch", "preserve_format contiguous_format channels_last channels_last_3d strided sparse_coo"),
        *names("torch.distributed.tensor", "DTensor"),
        *names("torch.distributed.tensor._api", "DTensor"),
        *names("torch.distributed._tensor.api", "DTensor"),
        *names("torch.distributed.tensor._dtensor_spec", "DTensorSpec TensorMeta ShardOrderEntry"),
        *names("torch.distributed._tensor._dtensor_spec", "DTensorSpec TensorMeta"),
        *names("torch.distributed._tensor.placement_types", "DTensorSpec TensorMeta Shard Replicate Partial _Partial"),
        *names("torch.distributed.tensor.placement_types", "Shard Replicate Partial _StridedShard"),
        *names("torch.distributed.device_mesh", "DeviceMesh"),
        *names("torch.distributed._mesh_layout", "_MeshLayout _FlatLayout"),
        *names("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
        *names("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
        *names("torch.distributed._shard.sharded_tensor.shard", "Shard"),
        *names(
            "torch.distributed._shard.sharded_tensor.metadata",
            "ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING",
        ),
        *names("torch.distributed._shard.metadata", "ShardMetadata"),
        *names("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
        *names("torch.distributed.remote_device", "_remote_device"),
        # The `.metadata` of a torch.distributed.checkpoint folder.
        *names(
            "torch.distributed.checkpoint.metadata",
            "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata MetadataIndex"
            " StorageMeta _MEM_FORMAT_ENCODING",
        ),
        *names("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *names("torch.masked.maskedtensor.core", "MaskedTensor"),
        # torchao's quantized tensors: what they set is their own attributes; how they were quantized is plain data.
        *names(
            "torchao.quantization",
            "Float8Tensor Int4Tensor Int4PlainInt32Tensor Int4PreshuffledTensor Int4TilePackedTo4dTensor Int8Tensor"
            " IntxOpaqueTensor IntxUnpackedToInt8Tensor",
        ),
        *names("torchao.quantization.granularity", "PerTensor PerRow PerBlock PerAxis PerGroup PerToken"),
        *names("torchao.quantization.quantize_.workflows.float8.float8_tensor", "QuantizeTensorToFloat8Kwargs"),
        *names("torchao.quantization.quantize_.workflows.int8.int8_tensor", "QuantizeTensorToInt8Kwargs"),
        *names("torchao.float8.inference", "Float8MMConfig"),
        *names("torchao.optim.subclass_4bit", "OptimState4bit"),
        *names("torchao.optim.subclass_8bit", "OptimState8bit"),
        *names("torchao.optim.subclass_fp8", "OptimStateFp8"),
        *_TORCHAO_ENUMS,
        *names("torch._dynamo.decorators", "_DimRange"),
        *names("torch.nested._internal.nested_tensor", "NestedTensor _rebuild_njt"),
        *names("torch.nn.parameter", "Buffer UninitializedParameter UninitializedBuffer"),
        # TorchScript's pickles.
        *names("torch", "ScriptObject"),
        *names("torch", " ".join(SCRIPT_STORAGE_DTYPES)),
        *names("torch.jit._pickle", "build_intlist build_tensorlist build_doublelist build_boollist"),
        *names("torch.jit._pickle", "build_tensor_from_id restore_type_tag"),
        # Training loops. TrainingArguments has no __reduce__ and no __setstate__: unpickling it sets its __dict__.
        *names("transformers.training_args", "TrainingArguments OptimizerNames ParallelMode"),
        *names("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
        *names(
            "transformers.trainer_utils",
            "IntervalStrategy SaveStrategy SchedulerType HubStrategy EvaluationStrategy FSDPOption",
        ),
        *names("transformers.trainer_pt_utils", "AcceleratorConfig"),
        *names("transformers.debug_utils", "DebugOption"),
        *names("transformers.trainer_callback", "TrainerState TrainerControl"),
        *names("transformers.generation.configuration_utils", "GenerationConfig"),
        *names("transformers.configuration_utils", "PretrainedConfig PreTrainedConfig"),
        *names("transformers.integrations.deepspeed", "HfDeepSpeedConfig HfTrainerDeepSpeedConfig"),
        *names("accelerate.state", "PartialState AcceleratorState"),
        *names(
            "accelerate.utils.dataclasses",
            "DistributedType DynamoBackend ComputeEnvironment PrecisionType TorchDynamoPlugin"
            " GradientAccumulationPlugin DeepSpeedPlugin FullyShardedDataParallelPlugin DataLoaderConfiguration"
            " ParallelismConfig",
        ),
        *names("accelerate.utils.deepspeed", "HfDeepSpeedConfig"),
        *names("accelerate.parallelism_config", "ParallelismConfig"),
        # What DeepSpeed keeps beside the shards of its optimizers.
        *names("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler"),
        *names("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        # By the names of its members, as Python 3.11.0 to 3.11.2 pickle them; they are not written large.
        *(f"deepspeed.runtime.zero.config.ZeroStageEnum.{one}" for one in _ZERO_STAGES),
        *names("deepspeed.utils.tensor_fragment", "fragment_address"),
        *names("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
        *(f"{one}.AttributeDict" for one in ("lightning.fabric.utilities.data", "lightning_fabric.utilities.data")),
        *(f"{one}.parsing.AttributeDict" for one in ("lightning.pytorch.utilities", "pytorch_lightning.utilities")),
    ]
)
#: Functions that compute on tensors, which a configuration or a whole module keeps.
_COMPUTING = frozenset(
    [
        *names("torch.nn.functional", torch_classes.FUNCTIONAL + " _threshold"),
        *names("torch._C._nn", torch_classes.FUNCTIONAL),
        *names("torch._C._VariableFunctionsClass", torch_classes.FUNCTIONAL),
        *names("torch._C", "_VariableFunctionsClass"),
        *names("torch", torch_classes.FUNCTIONAL + " rsqrt"),
        *names("torch.nn.init", torch_classes.INITIAL),
        # What a GradScaler's defaultdict makes its values with.
        *names("torch.amp.grad_scaler", "_refresh_per_optimizer_state"),
        *names("torch.cuda.amp.grad_scaler", "_refresh_per_optimizer_state"),
        # How a metric adds up what several processes have.
        *names("torchmetrics.utilities.data", "dim_zero_cat dim_zero_max dim_zero_mean dim_zero_min dim_zero_sum"),
        *names("torchmetrics.metric", "jit_distributed_available"),
        *(
            name
            for module in ("numpy", "torch", "torch._C._VariableFunctionsClass")
            for name in names(module, "mean median sum amax amin max min std var prod argmax argmin exp log sqrt abs")
        ),
        *names("torch.optim.lr_scheduler", "OneCycleLR._annealing_cos OneCycleLR._annealing_linear"),
        *names("torch.optim.lr_scheduler", "CyclicLR._triangular_scale_fn CyclicLR._triangular2_scale_fn"),
    ]
)
#: Modules whose parameters have no shape yet, and methods of theirs that are their hooks.
_LAZY_MODULES = frozenset(
    name for name in torch_classes.CLASSES if name.startswith("torch.nn.modules.") and ".Lazy" in name
)
_HOOKS_OF_LAZY_MODULES = ("_infer_parameters", "_lazy_load_hook")
#: What else a checkpoint may name and not call: annotations, callbacks, which old releases of Lightning took for keys,
#: Python's functions of numbers and text.
_NAMED = _COMPUTING | frozenset(
    [
        *names(
            "builtins",
            "abs all any ascii bin callable chr divmod enumerate format hash hex id isinstance issubclass"
            " len max min oct ord pow print repr reversed round sorted sum zip",
        ),
        *names(
            "math",
            "acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees dist erf erfc exp exp2"
            " expm1 fabs factorial floor fmod frexp fsum gamma gcd hypot isclose isfinite isinf isnan isqrt lcm ldexp"
            " lgamma log log10 log1p log2 modf nextafter perm pow prod radians remainder sin sinh sqrt tan tanh trunc"
            " ulp",
        ),
        *names(
            "typing",
            "Any Union Optional List Dict Tuple Set FrozenSet Type Sequence Mapping MutableMapping Callable Iterable"
            " Iterator Literal ClassVar Final Annotated",
        ),
        *names("types", "NoneType EllipsisType NotImplementedType"),
        *names("torch.optim.swa_utils", "SWALR._cosine_anneal SWALR._linear_anneal"),
        *(f"{module}.{hook}" for module in _LAZY_MODULES for hook in _HOOKS_OF_LAZY_MODULES),
        *(
            f"{root}.callbacks.{where}"
            for root in ("pytorch_lightning", "lightning.pytorch")
            for where in (
                *names("model_checkpoint", "ModelCheckpoint"),
                *names("early_stopping", "EarlyStopping"),
                *names("lr_monitor", "LearningRateMonitor"),
                *names("progress", "ProgressBar TQDMProgressBar RichProgressBar"),
                *names("stochastic_weight_avg", "StochasticWeightAveraging"),
                *names("gradient_accumulation_scheduler", "GradientAccumulationScheduler"),
                *names("timer", "Timer"),
            )
        ),
    ]
)
#: Modules of functions of tensors and nothing else, as torch names its own in C; not called either.
_MATHEMATICS = re.compile(r"torch\._C\.(?:_linalg\.linalg|_fft\.fft|_special\.special)_[a-z0-9_]+", re.ASCII)
#: Classes of numpy's types. Pickle names them; a type itself it makes by `numpy.dtype`.
_TYPE_CLASSES = re.compile(r"numpy\.dtypes\.\w+DType|numpy\.dtype\[\w+\]", re.ASCII)
#: What else keeps what it is given, many of a kind: what they are called is a pattern, and no attribute of them.
_KINDS = re.compile(
    r"transformers\.models\.\w+\.configuration_\w+\.[A-Z]\w*Config"
    r"|__torch__\.[\w.]+",
    re.ASCII,
)
#: Functions of numpy that call their second argument with the first, or the first where it is alone and a class.
GENERATOR_CONSTRUCTORS = tuple(names("numpy.random._pickle", "__randomstate_ctor __generator_ctor"))
#: Calls its argument where that is a class.
BIT_GENERATOR_CONSTRUCTOR = "numpy.random._pickle.__bit_generator_ctor"
#: The classes that these make an object of.
BIT_GENERATORS = tuple(
    f"numpy.random.{name}"
    for name in ("_mt19937.MT19937", "_pcg64.PCG64", "_pcg64.PCG64DXSM", "_philox.Philox", "_sfc64.SFC64")
)
#: What calls what it is given, and at which places of its arguments: a plain name must stand there.
CALLERS = {
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
SHARED = frozenset(
    [
        *names("logging", "getLogger"),
        *names("torch.jit._pickle", "build_intlist build_tensorlist build_doublelist build_boollist"),
        *names("torch.jit._pickle", "build_tensor_from_id restore_type_tag"),
        *names("torch.serialization", "_get_layout"),
        *names("accelerate.state", "PartialState AcceleratorState"),
        *names("zoneinfo", "ZoneInfo ZoneInfo._unpickle"),
        *_PYTHON_ENUMS,
        *names("transformers.training_args", "OptimizerNames ParallelMode"),
        *names(
            "transformers.trainer_utils",
            "IntervalStrategy SaveStrategy SchedulerType HubStrategy EvaluationStrategy FSDPOption",
        ),
        *names("transformers.debug_utils", "DebugOption"),
        *names("accelerate.utils.dataclasses", "DistributedType DynamoBackend ComputeEnvironment PrecisionType"),
        *names("torch.amp.grad_scaler", "OptState"),
        *names("torch.cuda.amp.grad_scaler", "OptState"),
        *names("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        *names("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        *names("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        *_TORCHAO_ENUMS,
    ]
)
#: Functions that pickle itself calls where it has no name for a value: in these calls they do nothing else.
SPELLING = frozenset(["builtins.getattr", "builtins.type", "operator.getitem", "functools.reduce", "operator.or_"])
#: Hooks that set attributes, of a name that they are given, of whatever module they are called with.
HOOKS = frozenset(
    [
        *names("torch.nn.utils.weight_norm", "WeightNorm"),
        *names(
            "torch.nn.utils.spectral_norm", "SpectralNorm SpectralNormLoadStateDictPreHook SpectralNormStateDictHook"
        ),
        *names("torch.nn.modules.module", "_WrappedHook"),
        *(one for one in torch_classes.CLASSES if one.startswith("torch.nn.utils.prune.")),
    ]
)
#: Enumerations: pickle makes their members by calling them; other classes of torch it makes empty.
_CALLED_CLASSES = frozenset(
    [
        *names("torch.amp.grad_scaler", "OptState"),
        *names("torch.cuda.amp.grad_scaler", "OptState"),
    ]
)
#: Constructors here open connections, make folders and look for devices.
_CONFIGURED = re.compile(
    r"(?:transformers|accelerate|omegaconf|deepspeed|torch\.distributed\.(?:device_mesh|_shard\.sharded_tensor))\.(?:\w+\.)*[A-Z]\w*\Z"
)
#: Known of names, and no harm: Python's own, beside what is data.
_HARMLESS = frozenset(names("operator", "itemgetter"))
#: The name of an enumeration's member, behind that of the enumeration.
_MEMBER = re.compile(r"[A-Z][A-Z0-9_]*\Z", re.ASCII)

#: What is known of names, by their beginning; the longest counts.
_KNOWN = {
    "__builtin__": "reaches Python's built-in functions",
    "__builtin__.eval": "runs any Python code",
    "__builtin__.execfile": "runs any Python file",
    "aiohttp": "talks to the network",
    "asyncio": "starts processes and opens connections",
    "bdb": "runs any Python code",
    "builtins": "reaches Python's built-in functions",
    "builtins.__import__": "imports any module",
    "builtins.compile": "compiles any Python code",
    "builtins.delattr": "changes any object",
    "builtins.eval": "runs any Python code",
    "builtins.exec": "runs any Python code",
    "builtins.getattr": "reaches any attribute of what it is given, and so any function",
    "builtins.open": "opens any file",
    "builtins.setattr": "changes any object",
    "builtins.type": "makes classes",
    "cProfile": "runs any Python code",
    "celery": "runs tasks",
    "cloudpickle": "unpickles again, without limits",
    "code": "runs any Python code",
    "codeop": "compiles any Python code",
    "commands": "runs shell commands",
    "copyreg._inverted_registry": "is a copyreg extension code: whatever the loading program has registered",
    "ctypes": "calls any C function",
    "cgitb": "runs what it is given",
    "dill": "unpickles again, without limits",
    "distutils": "writes files and runs programs",
    "doctest": "runs any Python code",
    "ensurepip": "installs packages",
    "fickling": "changes how pickles are checked",
    "functools": "wraps and calls any function",
    "gc": "reaches every object of the process",
    "http": "talks to the network",
    "httplib": "talks to the network",
    "idlelib": "runs any Python code",
    "imaplib": "talks to the network",
    "imp": "imports any module",
    "importlib": "imports any module",
    "inspect": "reaches any function's globals",
    "IPython": "runs any Python code",
    "itertools": "calls what it is given",
    "jax": "runs compiled code",
    "joblib": "unpickles again, without limits",
    "keras": "loads models that carry code",
    "lib2to3": "unpickles and runs what it is given",
    "linecache": "reads any file",
    "logging": "writes files, and its configuration calls any function",
    "marshal": "makes code objects",
    "mlflow": "loads models that carry code",
    "modelscan": "changes how pickles are checked",
    "multiprocessing": "starts processes",
    "nt": "runs shell commands",
    "numpy": "is a function of numpy that builds no data of a checkpoint",
    "numpy.f2py": "runs any Python code",
    "numpy.testing": "runs any Python code",
    "numpy.load": "unpickles any file",
    "numpy.memmap": "overwrites any file",
    "operator": "reaches any attribute of what it is given, and so any function",
    "os": "runs shell commands and changes files",
    "os.system": "runs shell commands",
    "pandas": "evaluates expressions and unpickles files",
    "paramiko": "talks to the network",
    "pdb": "runs any Python code",
    "pickle": "unpickles again, without limits",
    # In the name of these, opcodes that do what no pickler writes.
    "pickle.Unpickler.load_setitems": "sets a key or an element again, which no pickler does",
    "pickle.Unpickler.persistent_load": "may give back what is in an id that torch does not write",
    "_pickle": "unpickles again, without limits",
    "picklescan": "changes how pickles are checked",
    "pickletools": "is of no use to a checkpoint",
    "pip": "installs packages, which run code",
    "pkgutil": "imports any module",
    "pkg_resources": "imports any module",
    "platform": "runs shell commands",
    "popen2": "runs shell commands",
    "posix": "runs shell commands and changes files",
    "posix.system": "runs shell commands",
    "nt.system": "runs shell commands",
    "profile": "runs any Python code",
    "pty": "runs programs",
    "pydoc": "imports any module and runs programs",
    "py_compile": "writes files",
    "requests": "talks to the network",
    "runpy": "runs any Python file",
    "setuptools": "runs programs",
    "shelve": "unpickles any file",
    "shutil": "changes and deletes files",
    "signal": "changes how the process is interrupted",
    "site": "runs any Python file",
    "smtplib": "talks to the network",
    "socket": "talks to the network",
    "sqlite3": "opens any database, and its extensions",
    "ssl": "talks to the network",
    "subprocess": "runs programs",
    "sympy": "evaluates expressions",
    "sys": "changes the running Python",
    "tempfile": "writes files",
    "tensorflow": "loads models that carry code",
    "test": "runs any Python code",
    "threading": "starts threads",
    "_thread": "starts threads",
    "timeit": "runs any Python code",
    "torch": "is a function of torch that builds no data of a checkpoint",
    "torch._dynamo": "runs any Python code",
    "torch._inductor": "compiles and runs programs",
    "torch._C": "is a part of torch that no checkpoint needs",
    "torch._C.PyTorchFileReader": "opens any file",
    "torch._C.PyTorchFileWriter": "overwrites any file",
    "torch.distributed": "talks to other processes",
    "torch.fx": "runs code that is given as text",
    "torch.hub": "downloads and runs code",
    "torch.jit": "loads and runs code",
    "torch.load": "unpickles any file",
    "torch.ops": "loads libraries",
    "torch.package": "loads and runs code",
    "torch.serialization.load": "unpickles any file",
    "torch.storage._load_from_bytes": "unpickles the bytes that it is given, without limits",
    "torch.multiprocessing": "starts processes",
    "torch.utils": "is a tool of torch that builds no data of a checkpoint",
    "torch.utils.bottleneck": "runs any Python file",
    "torch.utils.cpp_extension": "compiles and runs programs",
    "torch.utils.collect_env": "runs shell commands",
    "torch.utils.data": "loads data, and is none of a checkpoint",
    "torch.classes": "loads libraries",
    "torchvision.io": "reads and writes files",
    "trace": "runs any Python code",
    "types": "is a part of Python that no checkpoint needs",
    "types.CodeType": "makes code objects",
    "types.FunctionType": "makes functions of code objects",
    "types.LambdaType": "makes functions of code objects",
    "urllib": "talks to the network",
    "urllib2": "talks to the network",
    "uv": "runs programs",
    "venv": "makes environments, which runs programs",
    "webbrowser": "starts programs and talks to the network",
    "weakref": "calls what it is given",
    "zipimport": "imports any module",
}
#: Parts of the longest of these names.
_MOST_PARTS = max(name.count(".") for name in _KNOWN) + 1
#: Packages of which nothing is clean that no list says is.
_HARMFUL = frozenset(
    [
        *names("torch", "utils hub"),
        *names("torchvision", "io"),
        *names("scipy", "io"),
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
_GRAPHS = frozenset(["GraphModule", "Graph", "CodeGen"])
#: Classes of Python's by which other modules import them.
_ALIASES = {
    "ABCMeta": "makes classes",
    "CDLL": "calls any C function",
    "CodeType": "makes code objects",
    "EnumMeta": "makes classes",
    "EnumType": "makes classes",
    "FileIO": "opens any file",
    "FunctionType": "makes functions of code objects",
    "Popen": "runs programs",
    "PyDLL": "calls any C function",
    "TemporaryDirectory": "writes files",
    "ZipFile": "opens any file",
}
#: Modules in C, and those that are known for them.
_TWINS = {
    "_operator": "operator",
    "_functools": "functools",
    "_collections": "collections",
    "pathlib._local": "pathlib",
}
#: Python's own modules: those of the Python that runs, and those of older and newer ones.
_LIBRARY = frozenset(
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
    """Whether `module.name` only builds data that ordinary checkpoints hold, or is named by them and not called."""
    whole = f"{module}.{name}"
    if is_named(whole) or _MATHEMATICS.fullmatch(whole):
        return not called
    # A class's module has all that it imports itself: behind another dot is every function there is.
    if (
        whole in DATA
        or whole in safe_globals.allowed()
        or is_class(whole)
        or ("." not in name and _KINDS.fullmatch(whole))
    ):
        return True
    return is_member(whole)


def is_member(whole: str) -> bool:
    """Return whether this is a member of an enumeration that checkpoints hold."""
    owner, _, member = whole.rpartition(".")
    return _MEMBER.match(member) is not None and owner.partition(".")[0] != "builtins" and owner in DATA


def is_class(whole: str) -> bool:
    """Whether it is a class of torch that only keeps what it is given, by the name of any release."""
    moved = next((new + whole[len(old) :] for old, new in torch_classes.MOVED.items() if whole.startswith(old)), whole)
    return moved in torch_classes.CLASSES


def computes(whole: str) -> bool:
    """Whether it is a function that takes tensors and numbers and gives tensors and numbers."""
    return whole in _COMPUTING or _MATHEMATICS.fullmatch(whole) is not None


def is_named(whole: str) -> bool:
    """Whether it is a name that may be kept, and is clean where it is not called."""
    return whole in _NAMED or _TYPE_CLASSES.fullmatch(whole) is not None


def is_hook_of_lazy_module(whole: str, method: str) -> bool:
    """Return whether a class of torch without shapes has this method for its hook, which pickle finds by getattr."""
    return whole in _LAZY_MODULES and method in _HOOKS_OF_LAZY_MODULES


def is_configuration(whole: str) -> bool:
    """Whether it is a class of settings: its constructor does more than keep them."""
    return _CONFIGURED.match(whole) is not None


def is_made_empty(whole: str) -> bool:
    """Whether pickle makes objects of this class empty, so that calling it is nothing a pickler writes."""
    if whole in _CALLED_CLASSES or whole in SHARED:
        return False
    return is_class(whole) or is_configuration(whole)


def harm(module: str, name: str, *, called: bool = False) -> str | None:
    """What the name is known for, in a few words; None where nothing is known of it. Not for clean names."""
    parts = f"{module}.{name}".partition("[")[0].split(".")
    if plain(module, name) in _HARMLESS:
        return None
    known = _known(parts)
    if any(part.startswith("__") and part.endswith("__") for part in parts[1:]):
        return known or "reaches inside an object, where any function can be had"
    if parts[0] in _LIBRARY or (parts[0].startswith("_") and parts[0] not in ("__main__", "__mp_main__")):
        return known or "is a part of Python that no checkpoint needs"
    if parts[0] in _HARMFUL or ".".join(parts[:2]) in _HARMFUL:
        return known or "runs code or programs"
    return _alias(name.split(".")) or (
        _of_torch(parts, name, known, called) if parts[0] in ("torch", "numpy") else None
    )


def _known(parts: list[str]) -> str | None:
    longest = min(len(parts), _MOST_PARTS)
    return next((_KNOWN[one] for end in range(longest, 0, -1) if (one := ".".join(parts[:end])) in _KNOWN), None)


def _alias(parts: list[str]) -> str | None:
    """What a class of Python's is known for where another module has imported it, or the module that it is of."""
    for at, part in enumerate(parts):
        if part in _KNOWN and part in _LIBRARY and at + 1 < len(parts):
            return _known(parts[at:])
    return _ALIASES.get(parts[-1])


def _of_torch(parts: list[str], name: str, known: str | None, called: bool) -> str | None:
    """Functions of torch and numpy; classes if they are called, or known for more than being theirs."""
    if parts[0] == "torch" and parts[-1] in _GRAPHS:
        return _KNOWN["torch.fx"]
    is_class = parts[-1].lstrip("_")[:1].isupper() and "." not in name
    if is_class and known == _KNOWN[parts[0]]:
        return f"is a class of {parts[0]} that is no data of a checkpoint" if called else None
    return known


def plain(module: str, name: str) -> str:
    """The `module.name` by which the tables here know it: Python 3's, and not that of its twin in C."""
    module, name = renamed(module, name)
    return f"{_TWINS.get(module, module)}.{name}"


@lru_cache(maxsize=4096)
def renamed(module: str, name: str) -> tuple[str, str]:
    """The name as Python 3 takes what Python 2 wrote: `commands.getoutput` is of subprocess.

    It does so for pickles of protocols 0 to 2, and a name that Python 2 alone had leads nowhere in the others.
    """
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    if (module, name) in NAME_MAPPING:
        return NAME_MAPPING[module, name]
    return IMPORT_MAPPING.get(module, module), name
