"""WikiText-103, the set of ALiBi's tables: Wikipedia's good and featured articles."""

from data_prep.corpora._articles import SPLIT_FILES, expand, read
from data_prep.corpora._base import PublishedCorpus

CORPUS = PublishedCorpus(
    about="28,475 / 60 / 60 articles of Wikipedia, over 100 million words, articles of 3,600 words",
    files=dict.fromkeys(SPLIT_FILES),
    where="Hugging Face Salesforce/wikitext, wikitext-103-v1 (tokenised) and wikitext-103-raw-v1: "
    "one row a line, to be written out as these files; or the original wikitext-103-v1.zip (md5 "
    "9ddaacaf6af0710eda8c456decff7832 in torchtext), where somebody still has it",
    format="lines of text (1,801,350 / 3,760 / 4,358), ` = Title = ` heads an article, ` = = Section "
    "= = ` a part of it; words apart, with joiners @-@ @,@ @.@; .tokens has <unk> for rare words, "
    ".raw keeps them. A document is an article with its headings; the files are the splits",
    licence="CC BY-SA 4.0 on the card of Salesforce/wikitext",
    notes="ALiBi's perplexities are per word, over its vocabulary of words. Per token of GPT-2's "
    "BPE they are other numbers, and text with @-@ and <unk> is not what that BPE was made for: "
    "compare methods with each other, not with that table",
    options={"split": "published"},
    expand=expand,
    read=read,
    split_files=SPLIT_FILES,
)
