#include <torch/extension.h>

void roi_align_forward_cuda(torch::Tensor input, torch::Tensor rois, torch::Tensor output, torch::Tensor argmax_y,
                            torch::Tensor argmax_x, int ah, int aw, float scale, int ratio, int mode, bool aligned);
void roi_align_backward_cuda(torch::Tensor grad_output, torch::Tensor rois, torch::Tensor argmax_y,
                             torch::Tensor argmax_x, torch::Tensor grad_input, int ah, int aw, float scale, int ratio,
                             int mode, bool aligned);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("roi_align_forward", &roi_align_forward_cuda);
  m.def("roi_align_backward", &roi_align_backward_cuda);
}
