/* Included before each Cython module (gcc -include). Cython adds a frame to a traceback for each of its functions that
   an exception leaves. They are left out, so a traceback ends at the user's line. `python -X dev` keeps them.
   A `with` statement of Cython needs a traceback and crashes without one: use `with gil` and `with nogil` only. */
#ifndef SR_FOLD_FRAMES_H
#define SR_FOLD_FRAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { SR_FLAG_DEV_MODE = 13 }; /* its place in sys.flags */

static inline int sr_traceback_here(PyFrameObject *frame)
{
    PyObject *flags = PySys_GetObject("flags"); /* borrowed; the exception in flight stays */
    if (flags == NULL || !PyTuple_Check(flags) || PyTuple_GET_SIZE(flags) <= SR_FLAG_DEV_MODE)
        return 0;
    return PyTuple_GET_ITEM(flags, SR_FLAG_DEV_MODE) == Py_True ? PyTraceBack_Here(frame) : 0;
}

#define PyTraceBack_Here(frame) sr_traceback_here(frame)

#endif
