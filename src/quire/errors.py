"""Every exception that quire raises.

    QuireError
    ├── ShapeError               sizes that do not fit together                    ValueError, RuntimeError
    ├── RankError                not [B, H, L, D]                                  ValueError, NotImplementedError
    ├── DtypeError               a dtype we do not take                            ValueError, TypeError
    ├── DeviceError              tensors on different or unknown devices           ValueError, RuntimeError
    ├── HeadsError               query and key heads that do not divide            ValueError
    ├── TensorKindError          nested, fake, distributed or functorch tensors    NotImplementedError, TypeError
    ├── ArgumentError            a number or value out of its range                ValueError, TypeError
    ├── OptionError              kernel_options, AuxRequest                        ValueError, RuntimeError, AssertionError
    ├── BackendError             the backend asked for cannot run this             NotImplementedError
    ├── CodegenError             generated code that is malformed: a bug of ours   RuntimeError
    ├── KernelMismatchError      a kernel computed something else (QUIRE_CHECK=1)  RuntimeError
    ├── MissingModelError        a model that is not installed, or another one     ImportError
    ├── TorchVersionError        a PyTorch without a name that quire stands on     ImportError
    ├── MissingPackageError      a package that a part of quire needs              ImportError
    ├── MissingFileError         a file to be read that is not there               FileNotFoundError
    ├── BlockMaskError           a block mask that is not one                      RuntimeError, AssertionError, ValueError
    │   ├── BlockMaskShapeError  made for other batches, heads or lengths          (as above)
    │   ├── BlockIndexError      no such batch, head or row of blocks              IndexError
    │   ├── SlicedMaskError      the mask_mod of a slice was used                  (as above)
    │   ├── MaskPickleError      its mask_mod cannot be written down               pickle.PicklingError
    │   └── MaskFileError        a file that holds none, or a damaged one          OSError
    ├── KVCacheError             a paged cache was asked for what it refuses       RuntimeError, ValueError
    │   ├── OutOfPages           more pages were asked for than there are          AssertionError
    │   ├── PageError            pages lost, owned twice, or used by nobody        AssertionError
    │   ├── SlotError            no such row of the page table                     IndexError
    │   ├── UnreservedError      a position that has no page                       IndexError
    │   ├── SequenceError        a sequence that was freed, or of another cache    (as above)
    │   ├── UnwrittenRowsError   rows that were made room for, and not filled      (as above)
    │   ├── ReleasedRowsError    rows that lie behind a sliding window             (as above)
    │   └── SequenceFileError    a file that holds no sequence, or a damaged one   OSError
    └── ModError                 a score_mod or mask_mod is at fault
        ├── NotCallableError     given as a mod, but no function                   RuntimeError, TypeError
        ├── ModSignatureError    takes the wrong number of arguments               AssertionError, TypeError
        ├── ModResultError       returned something that is no scalar              TypeError, ValueError
        ├── TracedBranchError    a Python `if` on a traced value                   TypeError, RuntimeError
        ├── RandomModError       random numbers, which are drawn once for a trace  RuntimeError
        ├── ModValueError        a value that no mod can compute with              TypeError, ValueError
        ├── UnsupportedOpError   an operation without a row in the op table        NotImplementedError
        ├── CapturedIndexError   an index outside a captured tensor                IndexError
        └── DivisionByZeroError  an integer divided by zero                        RuntimeError, ZeroDivisionError

Each also derives from the built-in type that PyTorch raises in the same place, so code that
catches PyTorch's errors catches ours. A message says what was expected, what came, what to do.
"""

from __future__ import annotations

import pickle


class QuireError(Exception):
    """The base of everything quire raises on purpose."""


class ShapeError(QuireError, ValueError, RuntimeError):
    """Sizes of tensors that do not fit together."""


class RankError(QuireError, ValueError, NotImplementedError):
    """A tensor with the wrong number of dimensions."""


class DtypeError(QuireError, ValueError, TypeError):
    """A dtype that attention does not take, or two that do not go together."""


class DeviceError(QuireError, ValueError, RuntimeError):
    """Tensors on different devices, or on one that nothing here runs on."""


class HeadsError(QuireError, ValueError):
    """Numbers of query and key heads that do not form groups."""


class TensorKindError(QuireError, NotImplementedError, TypeError):
    """A tensor without a plain block of memory: nested, fake, distributed, functorch."""


class ArgumentError(QuireError, ValueError, TypeError):
    """A number, tensor or value outside of what the argument means."""


class OptionError(QuireError, ValueError, RuntimeError, AssertionError):
    """Kernel options or requests that contradict each other or do not exist."""


class BackendError(QuireError, NotImplementedError):
    """The backend that was asked for cannot run these inputs."""


class CodegenError(QuireError, RuntimeError):
    """Generated code that is not well formed, or an object that cannot be loaded: a bug of ours."""


class KernelMismatchError(QuireError, RuntimeError):
    """A compiled kernel and the same computation in float64 do not agree: a bug of ours."""


class MissingModelError(QuireError, ImportError):
    """A model that is not installed, or whose file is not the one that it should be."""


class TorchVersionError(QuireError, ImportError):
    """A version of PyTorch that does not have a private name which quire stands on."""


class MissingPackageError(QuireError, ImportError):
    """A package that a part of quire is for, and that is not installed."""


class MissingFileError(QuireError, FileNotFoundError):
    """A file of a mask or a sequence that is not there."""


class BlockMaskError(QuireError, RuntimeError, AssertionError, ValueError):
    """Tensors or arguments that do not make a block mask."""


class BlockMaskShapeError(BlockMaskError):
    """A block mask made for other batches, heads or lengths than the tensors have."""


class BlockIndexError(BlockMaskError, IndexError):
    """An index into a block mask that names no batch, head or row of blocks."""


class SlicedMaskError(BlockMaskError):
    """The mask_mod of a sliced block mask, whose positions no longer mean anything."""


class MaskPickleError(BlockMaskError, pickle.PicklingError):
    """A block mask whose mask_mod cannot be traced, so that nothing can be written down."""


class MaskFileError(BlockMaskError, OSError):
    """A file that was to hold a block mask and does not, or is damaged."""


class KVCacheError(QuireError, RuntimeError, ValueError):
    """A request that a paged cache of keys and values refuses; it is as it was before."""


class OutOfPages(KVCacheError, AssertionError):
    """More pages were asked for than are free, can be evicted or may be added."""


class PageError(KVCacheError, AssertionError):
    """Pages that nobody holds, or tables and reference counts that contradict each other."""


class SlotError(KVCacheError, IndexError):
    """A batch index that is no row of the page table."""


class UnreservedError(KVCacheError, IndexError):
    """A position of a sequence that no page was reserved for."""


class SequenceError(KVCacheError):
    """A sequence that was freed, belongs to another cache or is named twice."""


class UnwrittenRowsError(KVCacheError):
    """Rows that `extend` made room for and `write` has not filled, or no longer may."""


class ReleasedRowsError(KVCacheError):
    """Rows that a sliding window left behind, whose pages are no longer held."""


class SequenceFileError(KVCacheError, OSError):
    """A file that was to hold a sequence and does not, is damaged or was made for another cache."""


class ModError(QuireError):
    """A score_mod or mask_mod that does something attention cannot follow."""


class NotCallableError(ModError, RuntimeError, TypeError):
    """Something given as a mod that cannot be called."""


class ModSignatureError(ModError, AssertionError, TypeError):
    """A mod that takes the wrong number of arguments."""


class ModResultError(ModError, TypeError, ValueError):
    """A mod that returned something other than one number or truth value."""


class TracedBranchError(ModError, TypeError, RuntimeError):
    """A Python branch on a value that differs from element to element."""


class RandomModError(ModError, RuntimeError):
    """A mod draws random numbers: what is drawn while it is traced would serve for every element."""


class ModValueError(ModError, TypeError, ValueError):
    """A mod computes with a value that is neither a number of 64 bits nor a tensor."""


class UnsupportedOpError(ModError, NotImplementedError):
    """An operation that has no row in the table of ops."""


class CapturedIndexError(ModError, IndexError):
    """An index outside of a captured tensor."""


class DivisionByZeroError(ModError, RuntimeError, ZeroDivisionError):
    """An integer divided by zero."""
