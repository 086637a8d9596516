"""llama.cpp's server for the hunt, by xllamacpp: --engine "python llama_cpp_server.py {model} {port} {chunk} {threads}" --as llama.cpp."""

import sys
import threading

import xllamacpp

model, port, chunk, threads = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.n_ctx, params.n_parallel, params.warmup = 2048, 4, False
params.n_ubatch, params.cpuparams.n_threads, params.port = min(int(chunk), 512), int(threads), int(port)
server = xllamacpp.Server(params)
threading.Event().wait()
