"""The ArXiv component of The Pile."""

from data_prep.corpora._base import PublishedCorpus

CORPUS = PublishedCorpus(
    about="articles as pandoc's Markdown with LaTeX formulas, 1.26 million documents of 46.6 KiB",
    files={
        "arxiv.jsonl.zst": "084b894f513986076a7d97e5c323c7fa8ebef1733f151a7fbdb139c19c07b571",
        "2020-09-08-arxiv-extracts-nofallback-until-2007-068.tar.gz": None,
    },
    format=".jsonl.zst with text and meta; the .tar.gz (KERPLE's) holds text files: unpack it",
    licence="each article its own",
    notes="its original hosts are gone; monology/pile-uncopyrighted (Hugging Face) holds the "
    "component under meta.pile_set_name ArXiv, in another order",
)
