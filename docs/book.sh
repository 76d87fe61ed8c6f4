#!/usr/bin/env bash
# book.sh [MDBOOK]: makes the handbook, static pages in target/book, of the documents as they lie in the repository.
# docs/SUMMARY.md has its chapters.
set -euo pipefail
cd "$(dirname "$0")/.."
mdbook=${1:-$(.ci/mdbook)}
source=target/book-source
rm -rf "$source" target/book
mkdir -p "$source/src"
# Pages keep their places, so that links between them hold; what they link to besides is not in the book.
git ls-files --cached --others --exclude-standard '*.md' 'docs/*.png' 'docs/*.svg' |
    while read -r file; do install -D -m 644 "$file" "$source/src/$file"; done
sed -E 's|\]\(\.\./|](|; t; s|\]\(([a-z]+\.md)|](docs/\1|' docs/SUMMARY.md > "$source/src/SUMMARY.md"
rm "$source/src/docs/SUMMARY.md"
cp docs/book.toml "$source/"
"$mdbook" build --dest-dir "$PWD/target/book" "$source"
# A chapter that is not there would be made, empty.
missing=$(sed -nE 's/.*\]\((.*)\.md\).*/\1/p' "$source/src/SUMMARY.md" |
    while read -r page; do [ -s "target/book/${page/README/index}.html" ] || echo "$page"; done)
[ -z "$missing" ] || { echo "the handbook lacks: $missing" >&2; exit 1; }
