"""Classes of torch that only keep their arguments, each at its defining module, and functions used as data.

A module has all its imports as attributes, so a class counts only in its defining module: `ABCMeta` is in many modules
of torch that define modules. Modules, optimizers, schedulers, observers, pruning methods and distributions of torch
2.13, with a few of older releases; a test holds the table against the installed torch.
"""

from __future__ import annotations

#: By module.
_CLASSES_BY_MODULE = {
    "torch.amp.grad_scaler": "GradScaler OptState",
    "torch.ao.nn.intrinsic.modules.fused": (
        "BNReLU2d BNReLU3d ConvAdd2d ConvAddReLU2d ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d "
        "ConvBnReLU3d ConvReLU1d ConvReLU2d ConvReLU3d LinearBn1d LinearLeakyReLU LinearReLU LinearTanh "
        "_FusedModule"
    ),
    "torch.ao.nn.intrinsic.qat.modules.conv_fused": (
        "ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d ConvBnReLU3d ConvReLU1d ConvReLU2d ConvReLU3d _ConvBnNd"
    ),
    "torch.ao.nn.intrinsic.qat.modules.linear_fused": "LinearBn1d",
    "torch.ao.nn.intrinsic.qat.modules.linear_relu": "LinearReLU",
    "torch.ao.nn.intrinsic.quantized.dynamic.modules.linear_relu": "LinearReLU",
    "torch.ao.nn.intrinsic.quantized.modules.bn_relu": "BNReLU2d BNReLU3d",
    "torch.ao.nn.intrinsic.quantized.modules.conv_add": "ConvAdd2d ConvAddReLU2d",
    "torch.ao.nn.intrinsic.quantized.modules.conv_relu": "ConvReLU1d ConvReLU2d ConvReLU3d",
    "torch.ao.nn.intrinsic.quantized.modules.linear_relu": "LinearLeakyReLU LinearReLU LinearTanh",
    "torch.ao.nn.qat.dynamic.modules.linear": "Linear",
    "torch.ao.nn.qat.modules.conv": "Conv1d Conv2d Conv3d _ConvNd",
    "torch.ao.nn.qat.modules.embedding_ops": "Embedding EmbeddingBag",
    "torch.ao.nn.qat.modules.linear": "Linear",
    "torch.ao.nn.quantizable.modules.activation": "MultiheadAttention",
    "torch.ao.nn.quantizable.modules.rnn": "LSTM LSTMCell _LSTMLayer _LSTMSingleLayer",
    "torch.ao.nn.quantized.dynamic.modules.conv": (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d"
    ),
    "torch.ao.nn.quantized.dynamic.modules.linear": "Linear",
    "torch.ao.nn.quantized.dynamic.modules.rnn": (
        "GRU GRUCell LSTM LSTMCell PackedParameter RNNBase RNNCell RNNCellBase"
    ),
    "torch.ao.nn.quantized.modules": "DeQuantize Quantize",
    "torch.ao.nn.quantized.modules.activation": (
        "ELU Hardswish LeakyReLU MultiheadAttention PReLU ReLU6 Sigmoid Softmax"
    ),
    "torch.ao.nn.quantized.modules.batchnorm": "BatchNorm2d BatchNorm3d _BatchNorm",
    "torch.ao.nn.quantized.modules.conv": (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d _ConvNd _ConvTransposeNd"
    ),
    "torch.ao.nn.quantized.modules.dropout": "Dropout",
    "torch.ao.nn.quantized.modules.embedding_ops": "Embedding EmbeddingBag EmbeddingPackedParams",
    "torch.ao.nn.quantized.modules.functional_modules": "FXFloatFunctional FloatFunctional QFunctional",
    "torch.ao.nn.quantized.modules.linear": "Linear LinearPackedParams",
    "torch.ao.nn.quantized.modules.normalization": "GroupNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm",
    "torch.ao.nn.quantized.modules.rnn": "LSTM",
    "torch.ao.nn.quantized.modules.utils": "WeightedQuantizedModule",
    "torch.ao.nn.quantized.reference.modules.conv": (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d _ConvNd _ConvTransposeNd"
    ),
    "torch.ao.nn.quantized.reference.modules.linear": "Linear",
    "torch.ao.nn.quantized.reference.modules.rnn": "GRU GRUCell LSTM LSTMCell RNNBase RNNCell RNNCellBase",
    "torch.ao.nn.quantized.reference.modules.sparse": "Embedding EmbeddingBag",
    "torch.ao.nn.quantized.reference.modules.utils": "ReferenceQuantizedModule",
    "torch.ao.quantization": "_DerivedObserverOrFakeQuantize",
    "torch.ao.quantization._learnable_fake_quantize": "_LearnableFakeQuantize",
    "torch.ao.quantization.fake_quantize": (
        "FakeQuantize FakeQuantizeBase FixedQParamsFakeQuantize FusedMovingAvgObsFakeQuantize"
    ),
    "torch.ao.quantization.observer": (
        "AffineQuantizedObserverBase FixedQParamsObserver HistogramObserver MinMaxObserver "
        "MovingAverageMinMaxObserver MovingAveragePerChannelMinMaxObserver NoopObserver ObserverBase "
        "PerChannelMinMaxObserver PlaceholderObserver RecordingObserver ReuseInputObserver "
        "UniformQuantizationObserverBase _PartialWrapper"
    ),
    "torch.ao.quantization.qconfig": "QConfig QConfigDynamic",
    "torch.ao.quantization.stubs": "DeQuantStub QuantStub QuantWrapper",
    "torch.cuda.amp.grad_scaler": "GradScaler OptState",
    "torch.distributions.bernoulli": "Bernoulli",
    "torch.distributions.beta": "Beta",
    "torch.distributions.binomial": "Binomial",
    "torch.distributions.categorical": "Categorical",
    "torch.distributions.cauchy": "Cauchy",
    "torch.distributions.chi2": "Chi2",
    "torch.distributions.constraints": (
        "Constraint MixtureSameFamilyConstraint _Boolean _Cat _CorrCholesky _Dependent _DependentProperty "
        "_GreaterThan _GreaterThanEq _HalfOpenInterval _IndependentConstraint _IntegerGreaterThan "
        "_IntegerInterval _IntegerLessThan _Interval _LessThan _LowerCholesky _LowerTriangular _Multinomial "
        "_OneHot _PositiveDefinite _PositiveSemidefinite _Real _Simplex _Square _Stack _Symmetric"
    ),
    "torch.distributions.continuous_bernoulli": "ContinuousBernoulli",
    "torch.distributions.dirichlet": "Dirichlet",
    "torch.distributions.distribution": "Distribution",
    "torch.distributions.exp_family": "ExponentialFamily",
    "torch.distributions.exponential": "Exponential",
    "torch.distributions.fishersnedecor": "FisherSnedecor",
    "torch.distributions.gamma": "Gamma",
    "torch.distributions.generalized_pareto": "GeneralizedPareto",
    "torch.distributions.geometric": "Geometric",
    "torch.distributions.gumbel": "Gumbel",
    "torch.distributions.half_cauchy": "HalfCauchy",
    "torch.distributions.half_normal": "HalfNormal",
    "torch.distributions.independent": "Independent",
    "torch.distributions.inverse_gamma": "InverseGamma",
    "torch.distributions.kumaraswamy": "Kumaraswamy",
    "torch.distributions.laplace": "Laplace",
    "torch.distributions.lkj_cholesky": "LKJCholesky",
    "torch.distributions.log_normal": "LogNormal",
    "torch.distributions.logistic_normal": "LogisticNormal",
    "torch.distributions.lowrank_multivariate_normal": "LowRankMultivariateNormal",
    "torch.distributions.mixture_same_family": "MixtureSameFamily",
    "torch.distributions.multinomial": "Multinomial",
    "torch.distributions.multivariate_normal": "MultivariateNormal",
    "torch.distributions.negative_binomial": "NegativeBinomial",
    "torch.distributions.normal": "Normal",
    "torch.distributions.one_hot_categorical": "OneHotCategorical OneHotCategoricalStraightThrough",
    "torch.distributions.pareto": "Pareto",
    "torch.distributions.poisson": "Poisson",
    "torch.distributions.relaxed_bernoulli": "LogitRelaxedBernoulli RelaxedBernoulli",
    "torch.distributions.relaxed_categorical": "ExpRelaxedCategorical RelaxedOneHotCategorical",
    "torch.distributions.studentT": "StudentT",
    "torch.distributions.transformed_distribution": "TransformedDistribution",
    "torch.distributions.transforms": (
        "AbsTransform AffineTransform CatTransform ComposeTransform CorrCholeskyTransform "
        "CumulativeDistributionTransform ExpTransform IndependentTransform LowerCholeskyTransform "
        "PositiveDefiniteTransform PowerTransform ReshapeTransform SigmoidTransform SoftmaxTransform "
        "SoftplusTransform StackTransform StickBreakingTransform TanhTransform Transform _InverseTransform"
    ),
    "torch.distributions.uniform": "Uniform",
    "torch.distributions.von_mises": "VonMises",
    "torch.distributions.weibull": "Weibull",
    "torch.distributions.wishart": "Wishart",
    "torch.nn.modules.activation": (
        "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax Mish "
        "MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus "
        "Softshrink Softsign Tanh Tanhshrink Threshold"
    ),
    "torch.nn.modules.adaptive": "AdaptiveLogSoftmaxWithLoss",
    "torch.nn.modules.batchnorm": (
        "BatchNorm1d BatchNorm2d BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d SyncBatchNorm "
        "_BatchNorm _LazyNormBase _NormBase"
    ),
    "torch.nn.modules.channelshuffle": "ChannelShuffle",
    "torch.nn.modules.container": "Container ModuleDict ModuleList ParameterDict ParameterList Sequential",
    "torch.nn.modules.conv": (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LazyConv1d LazyConv2d "
        "LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d _ConvNd _ConvTransposeMixin "
        "_ConvTransposeNd"
    ),
    "torch.nn.modules.distance": "CosineSimilarity PairwiseDistance",
    "torch.nn.modules.dropout": "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout _DropoutNd",
    "torch.nn.modules.flatten": "Flatten Unflatten",
    "torch.nn.modules.fold": "Fold Unfold",
    "torch.nn.modules.instancenorm": (
        "InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d LazyInstanceNorm2d "
        "LazyInstanceNorm3d _InstanceNorm"
    ),
    "torch.nn.modules.linear": "Bilinear Identity LazyLinear Linear NonDynamicallyQuantizableLinear _LinearWithBias",
    "torch.nn.modules.loss": (
        "BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss "
        "HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss MarginRankingLoss "
        "MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss NLLLoss2d PoissonNLLLoss "
        "SmoothL1Loss SoftMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss _Loss _WeightedLoss"
    ),
    "torch.nn.modules.module": "Module _WrappedHook",
    "torch.nn.modules.normalization": "CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm",
    "torch.nn.modules.padding": (
        "CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d "
        "ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d ZeroPad1d "
        "ZeroPad2d ZeroPad3d _CircularPadNd _ConstantPadNd _ReflectionPadNd _ReplicationPadNd"
    ),
    "torch.nn.modules.pixelshuffle": "PixelShuffle PixelUnshuffle",
    "torch.nn.modules.pooling": (
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d "
        "AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d FractionalMaxPool2d FractionalMaxPool3d LPPool1d "
        "LPPool2d LPPool3d MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d "
        "_AdaptiveAvgPoolNd _AdaptiveMaxPoolNd _AvgPoolNd _LPPoolNd _MaxPoolNd _MaxUnpoolNd"
    ),
    "torch.nn.modules.rnn": "GRU GRUCell LSTM LSTMCell RNN RNNBase RNNCell RNNCellBase",
    "torch.nn.modules.sparse": "Embedding EmbeddingBag",
    "torch.nn.modules.transformer": (
        "Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer"
    ),
    "torch.nn.modules.upsampling": "Upsample UpsamplingBilinear2d UpsamplingNearest2d",
    "torch.nn.utils.parametrizations": "_Orthogonal _SpectralNorm _WeightNorm",
    "torch.nn.utils.parametrize": "ParametrizationList",
    "torch.nn.utils.prune": (
        "BasePruningMethod CustomFromMask Identity L1Unstructured LnStructured PruningContainer "
        "RandomStructured RandomUnstructured"
    ),
    "torch.nn.utils.rnn": "PackedSequence PackedSequence_",
    "torch.nn.utils.spectral_norm": "SpectralNorm SpectralNormLoadStateDictPreHook SpectralNormStateDictHook",
    "torch.nn.utils.weight_norm": "WeightNorm",
    "torch.optim": "Adafactor Muon",
    "torch.optim.adadelta": "Adadelta",
    "torch.optim.adagrad": "Adagrad",
    "torch.optim.adam": "Adam",
    "torch.optim.adamax": "Adamax",
    "torch.optim.adamw": "AdamW",
    "torch.optim.asgd": "ASGD",
    "torch.optim.lbfgs": "LBFGS",
    "torch.optim.lr_scheduler": (
        "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR "
        "LRScheduler LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR PolynomialLR ReduceLROnPlateau "
        "SequentialLR StepLR _LRScheduler"
    ),
    "torch.optim.nadam": "NAdam",
    "torch.optim.optimizer": "Optimizer _RequiredParameter",
    "torch.optim.radam": "RAdam",
    "torch.optim.rmsprop": "RMSprop",
    "torch.optim.rprop": "Rprop",
    "torch.optim.sgd": "SGD",
    "torch.optim.sparse_adam": "SparseAdam",
    "torch.optim.swa_utils": "AveragedModel SWALR",
    "torch.distributed.algorithms.join": "_JoinConfig",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.nn.parallel.distributed": "DistributedDataParallel _BucketCapacityConfig",
    "torch.utils.hooks": "RemovableHandle",
    "torch.utils.data.dataset": "ConcatDataset StackDataset Subset TensorDataset",
}
#: Every one, as `module.name`.
CLASSES = frozenset(f"{module}.{name}" for module, names in _CLASSES_BY_MODULE.items() for name in names.split())
#: Where older releases of torch had the modules, which have the same classes still.
MOVED_MODULES = {
    "torch.nn.quantized.": "torch.ao.nn.quantized.",
    "torch.nn.qat.": "torch.ao.nn.qat.",
    "torch.nn.intrinsic.": "torch.ao.nn.intrinsic.",
    "torch.nn.quantizable.": "torch.ao.nn.quantizable.",
    "torch.quantization.": "torch.ao.quantization.",
}

#: Functions of torch.nn.functional; some are pickled as those of torch or of torch._C._nn.
FUNCTIONAL_FUNCTIONS = (
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d "
    "adaptive_max_pool3d_with_indices affine_grid alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm "
    "bilinear binary_cross_entropy binary_cross_entropy_with_logits celu celu_ channel_shuffle conv1d conv2d conv3d "
    "conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cosine_embedding_loss cosine_similarity "
    "cross_entropy ctc_loss dropout dropout1d dropout2d dropout3d elu elu_ embedding embedding_bag "
    "feature_alpha_dropout fold fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d "
    "fractional_max_pool3d_with_indices gaussian_nll_loss gelu glu grid_sample group_norm grouped_mm gumbel_softmax "
    "hardshrink hardsigmoid hardswish hardtanh hardtanh_ hinge_embedding_loss huber_loss instance_norm interpolate "
    "kl_div l1_loss layer_norm leaky_relu leaky_relu_ linear linear_cross_entropy local_response_norm log_sigmoid "
    "log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d margin_ranking_loss max_pool1d max_pool1d_with_indices "
    "max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d "
    "mish mse_loss multi_head_attention_forward multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss native_channel_shuffle nll_loss normalize one_hot pad pairwise_distance pdist "
    "pixel_shuffle pixel_unshuffle poisson_nll_loss prelu relu relu6 relu_ rms_norm rrelu rrelu_ "
    "scaled_dot_product_attention scaled_grouped_mm scaled_mm selu selu_ sigmoid silu smooth_l1_loss "
    "soft_margin_loss softmax softmin softplus softshrink softsign tanh tanhshrink threshold threshold_ "
    "triplet_margin_loss triplet_margin_with_distance_loss unfold upsample upsample_bilinear upsample_nearest"
)
#: Functions of torch.nn.init.
INIT_FUNCTIONS = (
    "calculate_gain constant constant_ dirac dirac_ eye eye_ kaiming_normal kaiming_normal_ kaiming_uniform "
    "kaiming_uniform_ normal normal_ ones_ orthogonal orthogonal_ sparse sparse_ trunc_normal_ uniform uniform_ "
    "xavier_normal xavier_normal_ xavier_uniform xavier_uniform_ zeros_"
)
