//! Finds the costs that measured steps speak for: a search, as the steps are no linear function of them.

use super::model::{Costs, Cut, Machine};

/// A step that was measured.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The model, as it was cut.
    pub cut: Cut,
    /// Sequences.
    pub batch: u32,
    /// Positions that each sees in the mean.
    pub context: f64,
    /// The machine, with the read limit of that run.
    pub machine: Machine,
    /// Time of the step.
    pub step_ms: f64,
}

/// Where the search begins: near enough that it finds its way on any group of H200s.
const START: Costs =
    Costs { reach: 0.98, reach_of_8: 0.95, exchange_us: 1.0, value_us: 0.03, rank_us: 1.0, step_us: 5.0 };
/// Each cost is tried so many times larger and smaller; the factor shrinks by its root until it changes less than
/// `LAST`.
const FIRST: f64 = 1.5;
const LAST: f64 = 1.001;

impl Measured {
    /// What the step takes by calculation.
    pub fn calculated_ms(&self, costs: &Costs) -> f64 {
        self.cut.step_ms(self.batch, self.context, &self.machine, costs)
    }

    /// By how much the calculation is off, over what was measured.
    pub fn error(&self, costs: &Costs) -> f64 {
        self.calculated_ms(costs) / self.step_ms - 1.0
    }
}

/// The costs with the least squares of relative errors.
pub fn fit(measured: &[Measured]) -> Costs {
    let squares = |costs: &Costs| measured.iter().map(|of| of.error(costs).powi(2)).sum::<f64>();
    let (mut costs, mut factor) = (START, FIRST);
    let mut least = squares(&costs);
    while factor > LAST {
        let before = least;
        for cost in 0..Costs::COUNT {
            for by in [factor, 1.0 / factor] {
                let mut tried = costs;
                *tried.all()[cost] *= by;
                tried.reach = tried.reach.min(1.0);
                tried.reach_of_8 = tried.reach_of_8.min(1.0);
                let off = squares(&tried);
                if off < least {
                    (costs, least) = (tried, off);
                }
            }
        }
        if least == before {
            factor = factor.sqrt();
        }
    }
    costs
}

impl Costs {
    /// How many they are.
    pub const COUNT: usize = 6;

    fn all(&mut self) -> [&mut f64; Self::COUNT] {
        let Self { reach, reach_of_8, exchange_us, value_us, rank_us, step_us } = self;
        [reach, reach_of_8, exchange_us, value_us, rank_us, step_us]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Shape;

    #[test]
    fn costs_are_found_again_in_steps_that_were_calculated_with_them() {
        let real =
            Costs { reach: 0.97, reach_of_8: 0.93, exchange_us: 1.7, value_us: 0.06, rank_us: 2.5, step_us: 20.0 };
        let machine = Machine::H200;
        let runs = [(Shape::Llama1B, 1), (Shape::Llama1B, 2), (Shape::B8, 1), (Shape::B8, 2), (Shape::B70, 2)];
        let measured: Vec<_> = runs
            .into_iter()
            .flat_map(|(shape, ranks)| {
                let cut = Cut::new(&shape.config(), ranks, machine.sms).unwrap();
                [1, 8].map(|batch| {
                    let step_ms = cut.step_ms(batch, 512.0, &machine, &real);
                    Measured { cut: cut.clone(), batch, context: 512.0, machine, step_ms }
                })
            })
            .collect();
        let found = fit(&measured);
        assert!(measured.iter().all(|of| of.error(&found).abs() < 0.01), "{found:?}");
        // And so they predict a group that they were not fitted on.
        let cut = Cut::new(&Shape::B8.config(), 4, machine.sms).unwrap();
        let [right, predicted] = [real, found].map(|costs| cut.step_ms(8, 512.0, &machine, &costs));
        assert!((predicted / right - 1.0).abs() < 0.02, "{found:?}: {predicted} for {right}");
    }
}
