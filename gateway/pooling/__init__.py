"""Makes vectors of texts (embeddings): a prompt that generates nothing and ends with the vector of its last token.

Open first: vectors.py, which runs the texts of a call and makes their vectors as the checkpoint says.

    vectors.py         the texts of one call, as requests of the gateway; cut and normalized
    pooling_files.py   what a checkpoint's sentence-transformers files say: pooling, normalization, prompts
    embeddings_api.py  /v1/embeddings, in OpenAI's form

The vector itself is a row of a decode worker's step (``StepBatch.pooled``); planning, prefix hits, replays, quotas and
priorities are those of every request.
"""
