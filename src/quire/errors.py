"""Every exception that quire raises.

    QuireError
    ├── ShapeError               sizes that do not fit together                    ValueError, RuntimeError
    ├── RankError                the wrong number of dimensions                    ValueError, NotImplementedError
    ├── DtypeError               a dtype that attention does not take              ValueError, TypeError
    ├── DeviceError              tensors on different or unknown devices           ValueError, RuntimeError
    ├── HeadsError               query and key heads that do not divide            ValueError
    ├── TensorKindError          nested, fake, distributed or functorch tensors    NotImplementedError, TypeError
    ├── ArgumentError            a number or value out of its range                ValueError, TypeError
    ├── OptionError              kernel_options, AuxRequest                        ValueError, RuntimeError, AssertionError
    ├── BackendError             the chosen backend cannot run this call           NotImplementedError
    ├── PackedTrainingError      a gradient through packed weights                 NotImplementedError, RuntimeError
    ├── PackedFileError          a file without packed layers, or a damaged one    OSError, ValueError
    ├── EngineError              an engine cannot do this                          RuntimeError
    │   ├── RequestTooLong       more tokens than the model or the pages hold      ValueError
    │   └── EngineClosed         the engine was closed                             (as above)
    ├── DistributedError         ranks that disagree, fail or are gone             RuntimeError
    ├── SamplingError            logits that no token can be drawn from            RuntimeError, ValueError
    ├── GrammarError             a grammar that cannot be compiled or followed     RuntimeError, ValueError
    ├── ApiError                 a request to the server that is refused           ValueError
    ├── CodegenError             generated code is malformed: a bug of quire       RuntimeError
    ├── KernelMismatchError      a kernel's result is wrong (QUIRE_CHECK=1)        RuntimeError
    ├── MissingModelError        a model that is not installed, or a wrong file    ImportError
    ├── TorchVersionError        this PyTorch lacks a name that quire uses         ImportError
    ├── MissingPackageError      a package that a part of quire needs              ImportError
    ├── MissingFileError         a file that does not exist                        FileNotFoundError
    ├── BlockMaskError           tensors that do not make a block mask             RuntimeError, AssertionError, ValueError
    │   ├── BlockMaskShapeError  made for other batches, heads or lengths          (as above)
    │   ├── BlockIndexError      no such batch, head or row of blocks              IndexError
    │   ├── SlicedMaskError      the mask_mod of a slice was used                  (as above)
    │   ├── MaskPickleError      its mask_mod cannot be pickled                    pickle.PicklingError
    │   └── MaskFileError        a file without a block mask, or a damaged one     OSError
    ├── KVCacheError             a paged cache cannot do this                      RuntimeError, ValueError
    │   ├── OutOfPages           more pages are needed than there are              AssertionError
    │   ├── PageError            pages lost, owned twice, or unused                AssertionError
    │   ├── SlotError            no such row of the page table                     IndexError
    │   ├── UnreservedError      a position that has no page                       IndexError
    │   ├── SequenceError        a sequence that was freed, or of another cache    (as above)
    │   ├── UnwrittenRowsError   rows that were reserved, but not written          (as above)
    │   ├── ReleasedRowsError    rows that a sliding window has released           (as above)
    │   └── SequenceFileError    a file without a sequence, or a damaged one       OSError
    └── ModError                 a mistake in a score_mod or mask_mod
        ├── NotCallableError     a mod that is not a function                      RuntimeError, TypeError
        ├── ModSignatureError    takes the wrong number of arguments               AssertionError, TypeError
        ├── ModResultError       does not return a scalar                          TypeError, ValueError
        ├── TracedBranchError    a Python `if` on a traced value                   TypeError, RuntimeError
        ├── RandomModError       random numbers, which are drawn once for a trace  RuntimeError
        ├── ModValueError        a value that no mod can compute with              TypeError, ValueError
        ├── UnsupportedOpError   an operation that quire does not compile          NotImplementedError
        ├── CapturedIndexError   an index outside a captured tensor                IndexError
        └── DivisionByZeroError  an integer divided by zero                        RuntimeError, ZeroDivisionError

Each also derives from the built-in types that PyTorch raises in the same place, so code that
catches PyTorch's errors catches these. A message reads "X must be A, but is B. Do C."
"""

from __future__ import annotations

import pickle


class QuireError(Exception):
    """The base of all errors that quire raises."""


class ShapeError(QuireError, ValueError, RuntimeError):
    """The sizes of tensors do not fit together."""


class RankError(QuireError, ValueError, NotImplementedError):
    """A tensor has the wrong number of dimensions."""


class DtypeError(QuireError, ValueError, TypeError):
    """A dtype that attention does not take, or two that do not fit together."""


class DeviceError(QuireError, ValueError, RuntimeError):
    """Tensors on different devices, or on a device that no backend runs on."""


class HeadsError(QuireError, ValueError):
    """The number of query heads is not a multiple of the number of key heads."""


class TensorKindError(QuireError, NotImplementedError, TypeError):
    """A tensor has no plain memory: it is nested, fake, distributed or from torch.func."""


class ArgumentError(QuireError, ValueError, TypeError):
    """An argument has a wrong type, or a value outside its range."""


class OptionError(QuireError, ValueError, RuntimeError, AssertionError):
    """Kernel options or requested outputs that contradict each other or do not exist."""


class BackendError(QuireError, NotImplementedError):
    """The chosen backend cannot run this call."""


class PackedTrainingError(QuireError, NotImplementedError, RuntimeError):
    """A gradient is wanted of a layer with packed weights, which cannot be trained."""


class PackedFileError(QuireError, OSError, ValueError):
    """A file holds no packed layers, is damaged, or was made for another model."""


class EngineError(QuireError, RuntimeError):
    """An engine cannot do what it is asked for."""


class RequestTooLong(EngineError, ValueError):
    """A request needs more positions than the model has, or more pages than the cache may take."""


class EngineClosed(EngineError):
    """The engine was closed, and takes no more requests."""


class DistributedError(QuireError, RuntimeError):
    """The ranks of a group do not agree, or one of them raised an error or is gone."""


class SamplingError(QuireError, RuntimeError, ValueError):
    """The logits of a request are NaN or infinite, so that no token can be drawn from them."""


class GrammarError(QuireError, RuntimeError, ValueError):
    """A grammar for structured output cannot be compiled, or an answer cannot follow it."""


class ApiError(QuireError, ValueError):
    """A request to the server is refused. `status` is that of HTTP, `code` and `param` OpenAI's."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after = retry_after


class CodegenError(QuireError, RuntimeError):
    """Generated code is malformed, or an object file cannot be loaded: a bug of quire."""


class KernelMismatchError(QuireError, RuntimeError):
    """A compiled kernel and the same computation in float64 differ: a bug of quire."""


class MissingModelError(QuireError, ImportError):
    """A model is not installed, or its file has the wrong content."""


class TorchVersionError(QuireError, ImportError):
    """This version of PyTorch lacks a private name that quire uses."""


class MissingPackageError(QuireError, ImportError):
    """A package that a part of quire needs is not installed."""


class MissingFileError(QuireError, FileNotFoundError):
    """The file of a mask or a sequence does not exist."""


class BlockMaskError(QuireError, RuntimeError, AssertionError, ValueError):
    """Tensors or arguments do not make a block mask."""


class BlockMaskShapeError(BlockMaskError):
    """A block mask was made for other batches, heads or lengths than the tensors have."""


class BlockIndexError(BlockMaskError, IndexError):
    """An index into a block mask is outside its batches, heads or rows of blocks."""


class SlicedMaskError(BlockMaskError):
    """The mask_mod of a slice of a block mask was called: positions in a slice are undefined."""


class MaskPickleError(BlockMaskError, pickle.PicklingError):
    """A block mask cannot be pickled, since its mask_mod cannot be traced."""


class MaskFileError(BlockMaskError, OSError):
    """A file holds no block mask, or is damaged."""


class KVCacheError(QuireError, RuntimeError, ValueError):
    """A paged cache of keys and values cannot do this. The cache is unchanged."""


class OutOfPages(KVCacheError, AssertionError):
    """More pages are needed than are free, can be evicted or may be added."""


class PageError(KVCacheError, AssertionError):
    """A page has no owner, or page tables and reference counts contradict each other."""


class SlotError(KVCacheError, IndexError):
    """A batch index is not a row of the page table."""


class UnreservedError(KVCacheError, IndexError):
    """No page was reserved for a position of a sequence."""


class SequenceError(KVCacheError):
    """A sequence was freed, belongs to another cache or is named twice."""


class UnwrittenRowsError(KVCacheError):
    """Rows that `extend` reserved were not written with `write`, or can no longer be written."""


class ReleasedRowsError(KVCacheError):
    """Rows are before a sliding window, so their pages were released."""


class SequenceFileError(KVCacheError, OSError):
    """A file holds no sequence, is damaged or was made for another cache."""


class ModError(QuireError):
    """A score_mod or mask_mod does something that attention does not support."""


class NotCallableError(ModError, RuntimeError, TypeError):
    """A mod is not callable."""


class ModSignatureError(ModError, AssertionError, TypeError):
    """A mod takes the wrong number of arguments."""


class ModResultError(ModError, TypeError, ValueError):
    """A mod does not return one number or bool."""


class TracedBranchError(ModError, TypeError, RuntimeError):
    """A mod has a Python branch on a value that differs from element to element."""


class RandomModError(ModError, RuntimeError):
    """A mod draws random numbers. A trace draws them once, so all elements would get the same."""


class ModValueError(ModError, TypeError, ValueError):
    """A mod computes with a value that is neither a 64-bit number nor a tensor."""


class UnsupportedOpError(ModError, NotImplementedError):
    """A mod uses an operation that is not in the table of ops."""


class CapturedIndexError(ModError, IndexError):
    """A mod indexes a captured tensor outside its bounds."""


class DivisionByZeroError(ModError, RuntimeError, ZeroDivisionError):
    """A mod divides an integer by zero."""
