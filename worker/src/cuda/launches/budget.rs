//! What a model takes of a GPU's memory: a table before anything is allocated, and a refusal that names what would fit.

use std::fmt::{self, Display};

use crate::decoder::LoadError;

/// Share of the free memory that is used: the driver, the kernels and their stacks need some.
const USABLE_PERCENT: u64 = 90;
const MIB: u64 = 1 << 20;

/// Bytes by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// Packed weights.
    pub weights: u64,
    /// Row-major embedding, where it is not the LM head.
    pub embedding: u64,
    /// One KV page, all layers.
    pub kv_page: u64,
    /// Words of the exchanges between blocks.
    pub words: u64,
    /// Logits of a pass.
    pub logits: u64,
    /// What the launches of a matrix pass share.
    pub matrix: u64,
    /// The sampler's exchange words, logits and counts of tokens.
    pub sampler: u64,
    /// Angles of all positions.
    pub rope: u64,
    /// Page tables, rows, attention's items, norms and biases.
    pub workspace: u64,
}

/// What was asked for of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvWish {
    /// Pages; 0: as many as are of use and fit.
    pub pages: u64,
    /// Bound on their bytes where `pages` is 0; 0: what is left.
    pub bytes_limit: u64,
    /// Pages that all slots can use at most.
    pub useful_pages: u64,
}

impl Needs {
    fn fixed(&self) -> u64 {
        [self.embedding, self.words, self.logits, self.matrix, self.sampler, self.rope, self.workspace]
            .into_iter()
            .fold(self.weights, u64::saturating_add)
    }

    /// How many KV pages there will be on a GPU with `free` bytes.
    ///
    /// # Errors
    /// [`LoadError::TooLarge`] with the flag and the value that would fit.
    pub fn pages(&self, wish: &KvWish, free: u64) -> Result<u64, LoadError> {
        let usable = free / 100 * USABLE_PERCENT;
        let too_large = |what, needed, help: String| {
            let table = self.table(0, free);
            Err(LoadError::TooLarge {
                what,
                needed,
                available: format!("{usable} of the GPU's {free} free bytes can be used; {help}\n{table}"),
            })
        };
        let Some(left) = usable.checked_sub(self.fixed()).filter(|left| *left >= self.kv_page) else {
            let needed = self.fixed().saturating_add(self.kv_page);
            let help = if self.weights + self.embedding + self.kv_page <= usable {
                "lower --max-context or --max-slots"
            } else {
                "the weights alone do not fit: use a smaller model, or --device cpu"
            };
            return too_large("the model and one KV page", needed, help.into());
        };
        let most = left / self.kv_page;
        if wish.pages > most {
            let needed = self.fixed().saturating_add(wish.pages.saturating_mul(self.kv_page));
            return too_large("the model and its KV pages", needed, format!("--kv-pages {most} would fit"));
        }
        if wish.pages > 0 {
            return Ok(wish.pages);
        }
        let limit = if wish.bytes_limit == 0 { most } else { wish.bytes_limit / self.kv_page };
        let pages = wish.useful_pages.min(limit);
        if pages == 0 {
            let least = self.kv_page.div_ceil(MIB);
            let available = format!("--kv-memory-mib is {}: {least} would be enough for one", wish.bytes_limit / MIB);
            return Err(LoadError::TooLarge { what: "KV pages", needed: self.kv_page, available });
        }
        if wish.bytes_limit > 0 && pages > most {
            let needed = self.fixed().saturating_add(pages.saturating_mul(self.kv_page));
            return too_large(
                "the model and its KV pages",
                needed,
                format!("--kv-memory-mib {} would fit", left / MIB),
            );
        }
        Ok(pages.min(most))
    }

    /// The table for the log.
    pub fn table(&self, pages: u64, free: u64) -> Table {
        Table { needs: *self, pages, free }
    }
}

/// [`Needs`] in lines.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    needs: Needs,
    pages: u64,
    free: u64,
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Needs { weights, embedding, kv_page, words, logits, matrix, sampler, rope, workspace } = self.needs;
        let kv = kv_page.saturating_mul(self.pages);
        let mut line = |name: &str, bytes: u64| writeln!(f, "{name:<22}{:>12.1} MiB", bytes as f64 / MIB as f64);
        line("weights", weights)?;
        line("embedding", embedding)?;
        line(&format!("{} KV pages", self.pages), kv)?;
        line("exchange words", words)?;
        line("logits", logits)?;
        line("matrix passes", matrix)?;
        line("sampler", sampler)?;
        line("rope", rope)?;
        line("workspace", workspace)?;
        line("in all", self.needs.fixed().saturating_add(kv))?;
        write!(f, "{:<22}{:>12.1} MiB", "free before", self.free as f64 / MIB as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs {
        weights: 1000 * MIB,
        embedding: 100 * MIB,
        kv_page: 8 * MIB,
        words: MIB,
        logits: MIB,
        matrix: 2 * MIB,
        sampler: MIB,
        rope: 2 * MIB,
        workspace: 3 * MIB,
    };
    const WISH: KvWish = KvWish { pages: 0, bytes_limit: 0, useful_pages: 1000 };

    fn refusal(wish: KvWish, free: u64) -> String {
        NEEDS.pages(&wish, free * MIB).unwrap_err().to_string()
    }

    #[test]
    fn what_is_left_of_nine_tenths_becomes_pages() {
        // 0.9 * 2000 = 1800; less 1110 is 690: 86 pages of 8.
        assert_eq!(NEEDS.pages(&WISH, 2000 * MIB).unwrap(), 86);
        assert_eq!(NEEDS.pages(&KvWish { useful_pages: 5, ..WISH }, 2000 * MIB).unwrap(), 5);
        assert_eq!(NEEDS.pages(&KvWish { bytes_limit: 81 * MIB, ..WISH }, 2000 * MIB).unwrap(), 10);
        assert_eq!(NEEDS.pages(&KvWish { pages: 86, ..WISH }, 2000 * MIB).unwrap(), 86);
    }

    #[test]
    fn a_refusal_names_the_flag_and_a_value_that_fits() {
        let told = refusal(KvWish { pages: 87, ..WISH }, 2000);
        assert!(told.contains("--kv-pages 86 would fit") && told.contains("weights"), "{told}");
        let told = refusal(KvWish { bytes_limit: 1000 * MIB, ..WISH }, 2000);
        assert!(told.contains("--kv-memory-mib 690 would fit"), "{told}");
        let told = refusal(KvWish { bytes_limit: MIB, ..WISH }, 2000);
        assert!(told.contains("--kv-memory-mib is 1: 8 would be enough"), "{told}");
        assert!(refusal(WISH, 1240).contains("--max-context"), "{}", refusal(WISH, 1240));
        assert!(refusal(WISH, 1100).contains("the weights alone do not fit"));
    }

    #[test]
    fn the_table_adds_up() {
        let table = NEEDS.table(10, 2000 * MIB).to_string();
        assert!(
            table.contains("10 KV pages") && table.contains("1190.0 MiB") && table.ends_with("2000.0 MiB"),
            "{table}"
        );
    }
}
