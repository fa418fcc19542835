"""The ArXiv component of The Pile."""

from data_prep.corpora._base import PublishedCorpus

CORPUS = PublishedCorpus(
    about="articles as pandoc's Markdown with LaTeX formulas (not LaTeX sources), 1.26 million "
    "documents of 46.6 KiB",
    files={
        "arxiv.jsonl.zst": "084b894f513986076a7d97e5c323c7fa8ebef1733f151a7fbdb139c19c07b571",
        "2020-09-08-arxiv-extracts-nofallback-until-2007-068.tar.gz": None,
    },
    where="its host (the-eye) is gone. Hugging Face monology/pile-uncopyrighted holds the component "
    "in the Pile's shards, in another order: --pile-set ArXiv; for evaluation alone, "
    "monology/pile-test-val",
    format=".jsonl.zst with text and meta; the .tar.gz (KERPLE's) holds one text file an article",
    licence="each article its own",
    notes="the two files are packed differently: figures of one do not match the other's to the "
    "digit. In shards of The Pile the component is oversampled, so leave exact duplicates out",
)
